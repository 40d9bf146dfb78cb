"""The algorithms, one family a file; :mod:`mixfed.algorithms.registry` has them all by name."""

from mixfed.algorithms.registry import ALGORITHMS, Entry, base_of

__all__ = ["ALGORITHMS", "Entry", "base_of"]
