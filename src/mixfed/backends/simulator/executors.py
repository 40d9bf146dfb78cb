"""How a cohort's client work is executed: one client after another, or many at once under vmap.

Both can run on a pool of threads with one core each (PyTorch's kernels release the interpreter's lock), both
cut the cohort into units that worker w of T takes as w, w + T, w + 2T, …, and both add weighted uploads up as they
come. The order of every addition is fixed, so a result does not depend on which thread is faster.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.backends.aggregate import WeightedSum, weighted_mean, wide
from mixfed.backends.simulator import cores
from mixfed.backends.work import as_convolved, client_work, is_finite
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Plan
from mixfed.core.private import PrivateStore
from mixfed.core.tree import Params
from mixfed.errors import InputError, explained
from mixfed.transforms.rows import select as rows
from mixfed.transforms.rows.select import RowDelivery

T = TypeVar("T")

WHOLE = 1 << 30
"""No limit to a chunk but a thread's share of the cohort."""

REUSED = 32 << 20
"""Freed blocks of so many bytes or less are used again (glibc allows no more); larger ones come from the system anew,
page by page."""


@dataclass
class Gathered:
    """What clients that were sent the same message did: the sum of their uploads, or the uploads themselves where an
    algorithm wants ``each``, what they keep, who was dropped, and what it weighs."""

    each: bool
    sum: WeightedSum = field(default_factory=WeightedSum)
    uploads: list[tuple[int, Upload]] = field(default_factory=list)
    private: list[tuple[list[int], Private]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    upload_bytes: int = 0
    row_bytes_down: int = 0
    id_bytes: int = 0

    def add(self, client: int, upload: Upload, private: Private) -> None:
        """Takes what one client did, unless a number in it is not finite."""
        if not bool(is_finite(upload, private)):
            self.dropped.append(client)
            return
        self.private.append(([client], tree.map_leaves(lambda x: x[None], private)))
        if self.each:
            self.uploads.append((client, upload))
        else:
            self.sum.add(client, upload)

    def add_chunk(
        self, clients: Sequence[int], upload: Upload, private: Private, picked: RowDelivery | None = None
    ) -> None:
        """Takes the uploads of a vmapped chunk: a leading dimension over its clients everywhere.

        Tables that came by rows are apart, as ``picked`` has them.
        """
        good = is_finite(upload, private, batched=True).expand(len(clients)).tolist()
        if self.each or not all(good):
            for i, client in enumerate(clients):
                one = Upload(_index(upload.values, i), upload.weight[i])
                self.add(client, one if picked is None else picked.with_rows(one, upload.values, i), _index(private, i))
            return
        self.private.append((list(clients), private))
        values = upload.values
        if picked is not None:
            weights = {t: upload.weight[owner] for t, owner in picked.owner.items()}
            values, tables = picked.apart(values)
            for leaves in tables.values():
                for t, x in leaves.items():
                    sums = wide(x)
                    leaves[t] = sums.mul_(weights[t].view(-1, *(1,) * (x.ndim - 1)).to(sums.dtype))
            self.sum.add_rows(picked.ids, weights, tables)
        mean = {k: {n: weighted_mean(upload.weight, x) for n, x in v.items()} for k, v in values.items()}
        self.sum.add_mean(clients, float(upload.weight.sum()), mean)

    def count_rows(self, picked: RowDelivery, payload: dict[str, Params]) -> None:
        """Counts the rows that went down, and the ids that asked for them."""
        self.row_bytes_down += picked.bytes_of_rows(payload)
        self.id_bytes += picked.bytes_of_ids

    def merge(self, other: Gathered) -> None:
        """Adds what another worker has gathered."""
        self.sum.merge(other.sum)
        self.uploads += other.uploads
        self.private += other.private
        self.dropped += other.dropped
        self.upload_bytes += other.upload_bytes
        self.row_bytes_down += other.row_bytes_down
        self.id_bytes += other.id_bytes


@dataclass(frozen=True)
class Execution:
    """A way to run a cohort: ``chunk`` = 0 runs clients one by one, else at most that many at once under vmap.

    So many ``threads`` work side by side, at most; one that is alone has all ``cores`` in each operator."""

    name: str
    chunk: int
    threads: int
    cores: int = 1

    def text(self) -> str:
        """The execution as a text that :meth:`parsed` reads, for a run that is to be repeated."""
        return f"{self.name} chunk={self.chunk} threads={self.threads} cores={self.cores}"

    @classmethod
    def parsed(cls, text: str) -> Execution:
        """The execution of such a text."""
        found = re.fullmatch(r"(loop|vmap) chunk=(\d+) threads=(\d+) cores=(\d+)", text)
        if found is None or (int(found[2]) == 0) != (found[1] == "loop") or not int(found[3]) * int(found[4]):
            raise InputError(f"'{text}' is no execution that a run could have chosen; leave it out to choose anew.")
        return cls(found[1], *map(int, found.groups()[1:]))

    def __str__(self) -> str:
        limit = f"chunks of at most {self.chunk}" if self.chunk < WHOLE else "a chunk for every thread"
        how = limit if self.chunk else "one client at a time"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.name} ({how}, {threads}{f' on {self.cores} cores' if self.cores > self.threads else ''})"


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
        """What a worker takes at a time: a client, or a vmapped chunk."""
        size = self.how.chunk or 1
        return [slice(i, min(i + size, len(self.plan))) for i in range(0, len(self.plan), size)]


def execute(algorithm: Algorithm, parts: Sequence[Cohort], privates: PrivateStore, pool: Pool) -> list[list[Gathered]]:
    """The client work of one or more cohorts, which share the workers; for each what was gathered by message."""
    if algorithm.model.has_convolutions:
        parts = [
            part if part.how.chunk else replace(part, messages=[as_convolved(m) for m in part.messages])
            for part in parts
        ]
    units = [(number, unit) for number, part in enumerate(parts) for unit in part.units()]
    workers = min(max(part.how.threads for part in parts), len(units))

    def work(worker: int) -> dict[tuple[int, int], Gathered]:
        gathered: dict[tuple[int, int], Gathered] = {}
        with torch.no_grad():
            for number, unit in units[worker::workers]:
                part = parts[number]

                def of(message: int, number: int = number) -> Gathered:
                    return gathered.setdefault((number, message), Gathered(each=algorithm.uploads == "each"))

                who = f"Client {int(part.plan.clients[unit.start])} of '{part.plan.source}' cannot train"
                failure = ("The vmap executor cannot run this model", "; choose loop") if part.how.chunk else (who, "")
                unit_work = _vmapped if part.how.chunk else _one_client
                with explained(*failure):
                    unit_work(algorithm, part, unit, privates, of)
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
    gathered.add(client, replace(upload, values=algorithm.decoded(upload.values)), private)


def _vmapped(algorithm: Algorithm, part: Cohort, unit: slice, privates: PrivateStore, of: GatheredOf) -> None:
    plan, which = part.plan, part.which[unit]
    numbers = np.unique(which).tolist()
    message, gathered = part.messages[numbers[0]], of(numbers[0])
    clients = [int(c) for c in plan.clients[unit]]
    batches = plan.chunk(unit, algorithm.model.device)
    private = privates.gather(plan.source, clients, message.first)
    picked = rows.pick(algorithm.rows.tables, message.payload, batches, clients) if algorithm.rows else None
    batches = picked.batches if picked else batches
    per_client: dict[str, Any] = {"fields": batches.fields, "key": batches.key}
    per_client |= {"steps": batches.steps, "examples": batches.examples, "extra": batches.extra}
    per_client |= {n: x for n, x in [("mask", batches.mask), ("active", batches.active)] if x is not None}

    sent = [part.messages[number].payload for number in which] if len(numbers) > 1 else []
    stacked = {
        k: {n: torch.stack([payload[k][n] for payload in sent]) for n in leaves}
        for k, leaves in (message.payload.items() if sent else ())
    }
    travelling = 0

    def one(
        given: dict[str, Any], private: Private, tables: dict[str, Params], stacked: dict[str, Params]
    ) -> tuple[dict[str, Params], Tensor, Private]:
        nonlocal travelling
        received = rows.with_tables(message, tables) if tables else message
        if stacked:
            received = replace(message, payload=stacked)
        upload, private = algorithm.client(received, private, replace(batches, **given))
        travelling = tree.nbytes(rows.shared(algorithm.rows.tables, upload.values))
        return algorithm.decoded(upload.values), upload.weight, private

    values, weight, private = torch.vmap(one)(per_client, private, picked.payload if picked else {}, stacked)
    if sent:
        _add_groups(of, which, clients, Upload(values, weight), private, travelling)
        return
    gathered.upload_bytes += travelling * len(clients)
    if picked:
        gathered.count_rows(picked, message.payload)
        gathered.upload_bytes += picked.bytes_of(values)
    gathered.add_chunk(clients, Upload(values, weight), private, picked)


def _add_groups(
    of: GatheredOf, which: NDArray[np.int64], clients: list[int], upload: Upload, private: Private, travelling: int
) -> None:
    """Adds a chunk whose clients were sent different messages; the means of all messages are one product a leaf."""
    numbers, owner = np.unique(which, return_inverse=True)
    members = [np.flatnonzero(owner == place) for place in range(len(numbers))]
    groups = [of(int(number)) for number in numbers]
    for gathered, own in zip(groups, members, strict=True):
        gathered.upload_bytes += travelling * len(own)
    if groups[0].each or not bool(is_finite(upload, private, batched=True).all()):
        for i, client in enumerate(clients):
            groups[owner[i]].add(client, Upload(_index(upload.values, i), upload.weight[i]), _index(private, i))
        return
    weights = torch.zeros(len(numbers), len(clients), dtype=upload.weight.dtype, device=upload.weight.device)
    weights[torch.from_numpy(owner), torch.arange(len(clients))] = upload.weight
    means = {k: {n: weighted_mean(weights, x) for n, x in v.items()} for k, v in upload.values.items()}
    for place, (gathered, own, weight) in enumerate(zip(groups, members, weights.sum(1).tolist(), strict=True)):
        theirs = slice(int(own[0]), int(own[-1]) + 1)
        gathered.sum.add_mean([clients[i] for i in own], weight, _index(means, place))
        gathered.private.append((clients[theirs], _index(private, theirs)))


def _index(trees: dict[str, Params], i: int | slice) -> dict[str, Params]:
    return {name: {leaf: x[i] for leaf, x in part.items()} for name, part in trees.items()}


def keep_freed_memory() -> None:
    """Asks glibc to reuse freed blocks instead of returning them: a round frees and asks for the same sizes again.

    Without it most of a small model's round is spent in page faults. Other C libraries are left as they are.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, REUSED)
    mallopt(trim_threshold, 512 << 20)
