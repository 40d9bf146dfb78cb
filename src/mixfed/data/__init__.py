"""Data on clients and at the centre: a store, readers, partitioners, known sources, a picture."""

from mixfed.data.store import Arrays, CentralData, FederatedData, Prepare, spread, validate

__all__ = ["Arrays", "CentralData", "FederatedData", "Prepare", "spread", "validate"]
