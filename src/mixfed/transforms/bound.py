"""``bounded``: any algorithm whose clients keep absurdly long updates to themselves."""

from __future__ import annotations

import math
from dataclasses import replace

from mixfed.core.algorithm import Algorithm
from mixfed.errors import InputError


def bounded(algorithm: Algorithm, norm: float) -> Algorithm:
    """The algorithm, with updates dropped whose norm ‖v‖ over all that a client sends up is larger than this.

    The client compares and drops, as it does with numbers that are not finite: it sends nothing, and keeps its private
    parts as they were. So the server needs no single update, and the same bound holds for sums, for every backend, and
    for clients that are late. Of an update that travels encoded the decoded values count.
    """
    if not (norm > 0 and math.isfinite(norm)):
        raise InputError(f"The norm of updates can be bounded by a number above 0, not by {norm}.")
    if not algorithm.batching:
        raise InputError(f"{algorithm.name} has no clients whose updates could be bounded; leave the bound out.")
    return replace(algorithm, bound=min(norm, algorithm.bound or math.inf))
