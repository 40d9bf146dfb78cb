"""How many processor cores the work of clients is worth.

Both ways to use a second core cost something at every operator: Python threads hand the interpreter's lock to and fro,
and PyTorch wakes its own threads and waits for them. That takes as long as a small operator or longer, so cores are
added where matrix products, or the steps of an optimizer, are large, and other work has a single core.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

LARGE_PRODUCT = 10_000_000
"""FLOPs of a matrix product from which on a core of its own pays (some tenths of a millisecond)."""

LARGE_MODEL = 1_000_000
"""Parameters that take as long to update."""

LOOKED_UP = 8
"""A number of a row that is looked up, and written back to where it was, takes as long as so many that are updated."""


def worth(product: float, parameters: float, at_most: int) -> int:
    """How many cores, from 1 on, have a large operator each, if so many FLOPs and parameters are shared among them."""
    return int(max(1, min(at_most, max(product / LARGE_PRODUCT, parameters / LARGE_MODEL))))


@contextmanager
def in_operators(count: int) -> Iterator[None]:
    """While active, an operator of this thread is shared among so many cores."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
