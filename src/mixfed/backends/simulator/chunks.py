"""How many clients are run at once: as many as memory allows, in chunks that are all alike."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from mixfed.backends.simulator.execution import WHOLE
from mixfed.backends.simulator.executors import REUSED
from mixfed.backends.simulator.factored import pays
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Plan
from mixfed.transforms.rows import select as rows

_CACHE = 8 << 20


class Sizes:
    """What the clients of plans of one shape take. ``chunk`` fixes how many run at once, if memory allows it."""

    def __init__(self, algorithm: Algorithm, plan: Plan, chunk: int | None) -> None:
        self._model, self._tables, self._chunk = algorithm.model, algorithm.rows.tables, chunk
        self._each = algorithm.uploads == "each"
        self._rank = int(np.prod(plan.rows.shape[1:]))
        self._slots, self._data = rows.slots(self._tables, plan), plan.bytes_per_client()

    @cached_property
    def factored(self) -> list[str]:
        """The weights that may stay in factors. Rows of tables have a way of their own."""
        shapes = self._model.shapes
        return [n for n in self._model.trainable if not self._tables and pays(shapes[n], self._rank)]

    def chunk(self, clients: int, name: str, threads: int, limit: int, memory: int) -> int:
        """As many of a cohort's clients as the limit and the memory allow, so that every thread has as many chunks."""
        limit = min(limit, memory // (self._client(name) * threads))
        if self._chunk is not None:
            return max(1, min(self._chunk, limit, clients))
        if self._model.device.type == "cpu":
            limit = min(limit, REUSED // max(4 * max(self._leaves[name], default=0), 1))
        rounds = -(-clients // (max(limit, 1) * threads))
        return -(-clients // (rounds * threads))

    def limit(self, name: str) -> int:
        """As many clients as fit the cache."""
        return max(1, _CACHE // self._client(name)) if self._chunk is None else WHOLE

    def numbers(self, name: str) -> int:
        """How many numbers of the model a client has."""
        return sum(self._leaves[name])

    def _client(self, name: str) -> int:
        """Bytes of one client."""
        return 3 * 4 * self.numbers(name) + 4 * self._data + 1

    @cached_property
    def _leaves(self) -> dict[str, list[int]]:
        """How many numbers each leaf of a client's model has, or its factors; a table that comes by rows, at most.

        Where an algorithm wants each upload, factors become matrices after training.
        """
        shapes, slots = self._model.shapes, self._slots
        dense = {n: math.prod((min(s[0], slots.get(n, s[0])), *s[1:]) if s else s) for n, s in shapes.items()}
        factors = dense | {n: self._rank * sum(shapes[n]) for n in self.factored if not self._each}
        return {"loop": list(dense.values()), "vmap": list(dense.values()), "factored": list(factors.values())}
