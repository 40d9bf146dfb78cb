"""How a cohort's client work is executed: one client after another, or many at once under vmap, where wide linear
layers may be in factors.

All can run on a pool of threads with one core each (PyTorch's kernels release the interpreter's lock), all cut the
cohort into units that worker w of T takes as w, w + T, w + 2T, …, and all add weighted uploads up as they come. The
order of every addition is fixed, so a result does not depend on which thread is faster.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.backends.aggregate import weighted_mean
from mixfed.backends.simulator import cores
from mixfed.backends.simulator.execution import Execution
from mixfed.backends.simulator.factored import InFactors, apart
from mixfed.backends.simulator.gathered import FactoredLeaves, Gathered, index
from mixfed.backends.work import as_convolved, client_work, fits, norm_of, norms_of
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Plan
from mixfed.core.private import PrivateStore
from mixfed.core.tree import Params
from mixfed.errors import explained
from mixfed.models.vmap import over_clients
from mixfed.transforms.rows import select as rows

T = TypeVar("T")

REUSED = 32 << 20
"""Freed blocks of so many bytes or less are used again (glibc allows no more); larger ones come from the system anew,
page by page."""


class Pool:
    """Threads that outlive a round, with one core in each operator; work of a single one is done right here."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, works: list[Callable[[], T]], alone: int) -> list[T]:
        """What each of the works gives; one that is alone has so many cores in each operator."""
        if len(works) == 1:
            with cores.in_operators(alone):
                return [works[0]()]
        return [future.result() for future in [self._pool.submit(work) for work in works]]


@dataclass(frozen=True)
class Cohort:
    """Clients that run as one cohort, how they are run, and what they were sent: client i got ``messages[which[i]]``.

    All were sent the same message, unless clients do the same in every round (:class:`mixfed.core.algorithm.Lateness`).
    """

    messages: Sequence[Message]
    which: NDArray[np.int64]
    plan: Plan
    how: Execution

    @classmethod
    def alike(cls, message: Message, plan: Plan, how: Execution) -> Cohort:
        """A cohort in which everyone was sent the same."""
        return cls([message], np.zeros(len(plan), np.int64), plan, how)

    def convolved(self) -> Cohort:
        """The same with messages in the memory layout that convolutions like."""
        return replace(self, messages=[as_convolved(message) for message in self.messages])

    def units(self) -> list[slice]:
        """What a worker takes at a time: a client, or a vmapped chunk; one in factors begins from one message."""
        size = self.how.chunk or 1
        cuts = (np.flatnonzero(np.diff(self.which)) + 1).tolist() if self.how.name == "factored" else []
        return [
            slice(i, min(i + size, end))
            for begin, end in pairwise([0, *cuts, len(self.plan)])
            for i in range(begin, end, size)
        ]


def execute(algorithm: Algorithm, parts: Sequence[Cohort], privates: PrivateStore, pool: Pool) -> list[list[Gathered]]:
    """The client work of one or more cohorts, which share the workers; for each what was gathered by message."""
    parts = [part.convolved() if algorithm.model.has_convolutions and not part.how.chunk else part for part in parts]
    units = [(number, unit) for number, part in enumerate(parts) for unit in part.units()]
    workers = min(max(part.how.threads for part in parts), len(units))

    def work(worker: int) -> dict[tuple[int, int], Gathered]:
        gathered: dict[tuple[int, int], Gathered] = {}
        with torch.no_grad():
            for number, unit in units[worker::workers]:
                part = parts[number]

                def of(message: int, number: int = number) -> Gathered:
                    return gathered.setdefault((number, message), Gathered.by(algorithm))

                execute_unit(algorithm, part, unit, privates, of)
        return gathered

    found: dict[tuple[int, int], Gathered] = {}
    alone = max(part.how.cores for part in parts)
    for gathered in pool.run([partial(work, worker) for worker in range(workers)], alone):
        for place, one in gathered.items():
            if place in found:
                found[place].merge(one)
            else:
                found[place] = one
    return [[found[number, m] for m in range(len(part.messages))] for number, part in enumerate(parts)]


GatheredOf = Callable[[int], Gathered]
"""What was gathered from the clients that were sent the message of this number."""


def execute_unit(algorithm: Algorithm, part: Cohort, unit: slice, privates: PrivateStore, of: GatheredOf) -> None:
    """The work of one client, or of one chunk of clients."""
    who = f"Client {int(part.plan.clients[unit.start])} of '{part.plan.source}' cannot train"
    cannot = f"The {part.how.name} executor cannot run this model"
    failure = (cannot, "; choose loop") if part.how.chunk else (who, "")
    with explained(*failure):
        (_vmapped if part.how.chunk else _one_client)(algorithm, part, unit, privates, of)


def _one_client(algorithm: Algorithm, part: Cohort, unit: slice, privates: PrivateStore, of: GatheredOf) -> None:
    plan, number = part.plan, int(part.which[unit.start])
    message, gathered = part.messages[number], of(number)
    client = int(plan.clients[unit.start])
    batches = plan.client(unit.start, algorithm.model.device)
    private = privates.get(plan.source, client, message.first)
    picked = rows.pick(algorithm.rows.tables, message.payload, batches, [client]) if algorithm.rows else None
    if picked:
        gathered.count_rows(picked, message.payload)
    upload, private = client_work(algorithm, message, private, batches, picked)
    gathered.upload_bytes += tree.nbytes(upload.values)
    upload = replace(upload, values=algorithm.decoded(upload.values))
    gathered.add(client, upload, private, norm_of(upload, private))


def _vmapped(algorithm: Algorithm, part: Cohort, unit: slice, privates: PrivateStore, of: GatheredOf) -> None:
    plan, which = part.plan, part.which[unit]
    numbers = [0] if len(part.messages) == 1 else np.unique(which).tolist()
    message, gathered = part.messages[numbers[0]], of(numbers[0])
    clients = plan.clients[unit].tolist()
    batches = plan.chunk(unit, algorithm.model.device)
    private = privates.gather(plan.source, clients, message.first)
    picked = rows.pick(algorithm.rows.tables, message.payload, batches, clients) if algorithm.rows else None
    batches = picked.batches if picked else batches
    if part.how.name == "factored" and not picked:
        batches = replace(batches, kernel=InFactors())
    per_client: dict[str, Any] = {"fields": batches.fields, "key": batches.key}
    per_client |= {"steps": batches.steps, "examples": batches.examples, "extra": batches.extra}
    per_client |= {n: x for n, x in [("mask", batches.mask), ("active", batches.active)] if x is not None}

    sent = [part.messages[number].payload for number in which] if len(numbers) > 1 else []
    stacked = {
        k: {n: torch.stack([payload[k][n] for payload in sent]) for n in leaves}
        for k, leaves in (message.payload.items() if sent else ())
    }
    travelling, factors = 0, FactoredLeaves()

    def one(
        given: dict[str, Any], private: Private, tables: dict[str, Params], stacked: dict[str, Params]
    ) -> tuple[dict[str, Params], Tensor, Private]:
        nonlocal travelling, factors
        received = rows.with_tables(message, tables) if tables else message
        if stacked:
            received = replace(message, payload=stacked)
        upload, private = algorithm.client(received, private, replace(batches, **given))
        travelling = tree.nbytes(rows.shared(algorithm.rows.tables, upload.values))
        values, factors = apart(algorithm.decoded(upload.values), in_factors=algorithm.uploads == "sum")
        return values, upload.weight, apart(private, in_factors=False)[0]

    tables = picked.payload if picked else {}
    values, weight, private = over_clients(one, len(clients), per_client, private, tables, stacked)
    if sent:
        _add_groups(of, which, clients, Upload(values, weight), private, travelling)
        return
    gathered.upload_bytes += travelling * len(clients)
    if picked:
        gathered.count_rows(picked, message.payload)
        gathered.upload_bytes += picked.bytes_of(values)
    gathered.add_chunk(clients, Upload(values, weight), private, picked, factors)


def _add_groups(
    of: GatheredOf, which: NDArray[np.int64], clients: list[int], upload: Upload, private: Private, travelling: int
) -> None:
    """Adds a chunk whose clients were sent different messages; the means of all messages are one product a leaf."""
    numbers, owner = np.unique(which, return_inverse=True)
    members = [np.flatnonzero(owner == place) for place in range(len(numbers))]
    groups = [of(int(number)) for number in numbers]
    for gathered, own in zip(groups, members, strict=True):
        gathered.upload_bytes += travelling * len(own)
    norms = norms_of(upload, private)
    if groups[0].each or not all(fits(norm, groups[0].bound) for norm in norms):
        for i, client in enumerate(clients):
            one = Upload(index(upload.values, i), upload.weight[i])
            groups[owner[i]].add(client, one, index(private, i), norms[i])
        return
    weights = torch.zeros(len(numbers), len(clients), dtype=upload.weight.dtype, device=upload.weight.device)
    weights[torch.from_numpy(owner), torch.arange(len(clients))] = upload.weight
    means = {k: {n: weighted_mean(weights, x) for n, x in v.items()} for k, v in upload.values.items()}
    for place, (gathered, own, weight) in enumerate(zip(groups, members, weights.sum(1).tolist(), strict=True)):
        theirs = slice(int(own[0]), int(own[-1]) + 1)
        gathered.norms |= {clients[i]: norms[i] for i in own}
        gathered.sum.add_mean([clients[i] for i in own], weight, index(means, place))
        gathered.private.append((clients[theirs], index(private, theirs)))


def keep_freed_memory() -> None:
    """Asks glibc to reuse freed blocks instead of returning them: a round frees and asks for the same sizes again.

    Without it most of a small model's round is spent in page faults. All threads ask for memory in one place: places of
    their own would be returned to the system whenever a few large blocks in them are free, in an LSTM at every step.
    Other C libraries are left as they are.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8
    mallopt(mmap_threshold, REUSED)
    mallopt(trim_threshold, 512 << 20)
    mallopt(arena_max, 1)
