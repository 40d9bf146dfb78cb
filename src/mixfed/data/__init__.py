"""Data on clients and at the centre: a store, readers, partitioners, known sources, a picture."""

from importlib import import_module
from typing import Any

from mixfed.data import partition
from mixfed.data.parts import open_part, save_parts
from mixfed.data.prepare import Pixels
from mixfed.data.readers import (
    central_from_huggingface,
    central_from_npz,
    central_from_parquet,
    federated_from_huggingface,
    federated_from_npz,
    federated_from_parquet,
    from_partitioner,
)
from mixfed.data.sources import SOURCES, Source, SourceInfo, load_source
from mixfed.data.store import Arrays, CentralData, FederatedData, Prepare, spread, validate

__all__ = [
    "SOURCES",
    "Arrays",
    "CentralData",
    "FederatedData",
    "Pixels",
    "Prepare",
    "Source",
    "SourceInfo",
    "central_from_huggingface",
    "central_from_npz",
    "central_from_parquet",
    "federated_from_huggingface",
    "federated_from_npz",
    "federated_from_parquet",
    "from_partitioner",
    "load_source",
    "open_part",
    "partition",
    "plot_holdings",
    "save_parts",
    "spread",
    "validate",
]


def __getattr__(name: str) -> Any:
    """The picture is drawn in another room, which is opened when it is wanted."""
    if name == "plot_holdings":
        return import_module("mixfed.experiments.report.ownership").plot_holdings
    raise AttributeError(f"module 'mixfed.data' has no attribute '{name}'")
