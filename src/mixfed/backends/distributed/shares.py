"""Which rank simulates which clients of a cohort.

Clients that keep nothing between rounds can be simulated anywhere: the longest are dealt out first, each to the rank
that has least to do (Graham, 1969: at most a third longer than the best possible). Clients that keep something belong
to a rank: rank r has a stretch of clients, so that all ranks hold about as many examples.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mixfed.core.batches import Batching

Numbers = NDArray[np.int64]
Deal = Callable[[Numbers, int], Numbers]
"""The rank of every client of a cohort, from how many steps each takes and the number of ranks."""


def longest_first(steps: Numbers, ranks: int) -> Numbers:
    """Deals the longest clients first, each to the rank with the fewest steps so far (the first of equals)."""
    owner = np.zeros(len(steps), np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    for client in np.argsort(-steps, kind="stable").tolist():
        load, rank = loads[0]
        owner[client] = rank
        heapq.heapreplace(loads, (load + int(steps[client]), rank))
    return owner


def in_turn(steps: Numbers, ranks: int) -> Numbers:
    """Deals clients out in turn, whatever they have to do."""
    return np.arange(len(steps), dtype=np.int64) % ranks


def in_stretches(steps: Numbers, ranks: int, unit: int = 1) -> Numbers:
    """Cuts a cohort into stretches of about as many steps; cuts are at multiples of ``unit`` clients."""
    before = np.concatenate([[0], np.cumsum(steps, dtype=np.int64)[:-1]])
    middle = (before + steps / 2)[np.arange(len(steps)) // unit * unit]
    return np.minimum(middle * ranks // max(int(steps.sum()), 1), ranks - 1).astype(np.int64)


def home_of(clients: Numbers, cuts: Numbers) -> Numbers:
    """The rank that each of the clients belongs to."""
    return np.searchsorted(cuts, clients, side="right") - 1


def steps_of(sizes: Numbers, batching: Batching) -> Numbers:
    """How many steps clients of these sizes take in a round."""
    if batching.steps is not None:
        return np.full_like(sizes, batching.steps)
    batch = batching.batch_size or np.maximum(sizes, 1)
    return np.asarray(-(-sizes // batch) * (batching.epochs or 1), np.int64)
