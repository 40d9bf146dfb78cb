"""How a cohort's client work is executed: one client after another, or many at once under vmap.

Both can run on a pool of threads with one core each (PyTorch's kernels release the interpreter's lock), both
cut the cohort into units that worker w of T takes as w, w + T, w + 2T, …, and both add weighted uploads up as they
come. The order of every addition is fixed, so a result does not depend on which thread is faster.
"""

from __future__ import annotations

import ctypes
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

from mixfed.backends.simulator import cores, factored
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Plan
from mixfed.core.factors import Factors, apart
from mixfed.core.private import PrivateStore
from mixfed.core.tree import Params
from mixfed.errors import explained
from mixfed.models.vmap import over_clients
from mixfed.transforms.rows import select as rows
from mixfed.transforms.rows.select import Picked, RowSum

T = TypeVar("T")

WHOLE = 1 << 30
"""No limit to a chunk but a thread's share of the cohort."""

REUSED = 32 << 20
"""Freed blocks of so many bytes or less are used again (glibc allows no more); larger ones come from the system anew,
page by page."""


@dataclass
class Tally:
    """The weighted sum of uploads so far, which is factor·total (and the uploads themselves where an algorithm wants
    each). So a lone client's update, or that of a single chunk, is its own mean."""

    each: bool
    total: dict[str, Params] | None = None
    factor: float = 1.0
    weight: float = 0.0
    uploads: list[tuple[int, Upload]] = field(default_factory=list)
    private: list[tuple[list[int], Private]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    upload_bytes: int = 0
    row_bytes_down: int = 0
    id_bytes: int = 0
    row_sum: RowSum | None = None

    def add(self, client: int, upload: Upload, private: Private) -> None:
        """Takes what one client did, unless a number in it is not finite."""
        if not bool(_finite({"up": upload.values, "kept": private})):
            self.dropped.append(client)
            return
        self.used.append(client)
        self.private.append(([client], tree.map_leaves(lambda x: x[None], private)))
        if self.each:
            self.uploads.append((client, upload))
            return
        weight = float(upload.weight)
        self.weight += weight
        values = {k: {n: _wide(x) for n, x in v.items()} for k, v in upload.values.items()}
        if upload.rows:
            tables = {k: {n: x * weight for n, x in v.items() if n in upload.rows} for k, v in values.items()}
            self._add_rows(upload.rows, {t: torch.full((len(i),), weight) for t, i in upload.rows.items()}, tables)
            values = rows.shared(upload.rows, values)
        self._accumulate(values, weight)

    def add_chunk(
        self,
        clients: Sequence[int],
        upload: Upload,
        private: Private,
        picked: Picked | None = None,
        in_factors: dict[str, dict[str, Factors]] | None = None,
    ) -> None:
        """Takes the uploads of a vmapped chunk: a leading dimension over its clients everywhere.

        Tables that came by rows are apart, as ``picked`` has them, and so is what is ``in_factors``, whose mean is one
        product. Its numbers are all finite where those of the mean are.
        """
        factors, share = in_factors or {}, upload.weight / upload.weight.sum()
        means = {k: {n: _wide(x.weighted_sum(share)) for n, x in v.items()} for k, v in factors.items()}
        finite = _finite({"up": upload.values, "kept": private}, batched=True).expand(len(clients)) & _finite(means)
        if self.each or not bool(finite.all()):
            values = {k: v | {n: x.dense() for n, x in factors.get(k, {}).items()} for k, v in upload.values.items()}
            for i, client in enumerate(clients):
                one = Upload(_index(values, i), upload.weight[i])
                self.add(client, one if picked is None else picked.with_rows(one, values, i), _index(private, i))
            return
        self.private.append((list(clients), private))
        values = upload.values
        if picked is not None:
            weights = {t: upload.weight[owner] for t, owner in picked.owner.items()}
            values, tables = picked.apart(values)
            for leaves in tables.values():
                for t, x in leaves.items():
                    wide = _wide(x)
                    leaves[t] = wide.mul_(weights[t].view(-1, *(1,) * (x.ndim - 1)).to(wide.dtype))
            self._add_rows(picked.ids, weights, tables)
        mean = {k: {n: _weighted_mean(upload.weight, x) for n, x in v.items()} for k, v in values.items()}
        self.add_mean(clients, float(upload.weight.sum()), {k: v | means.get(k, {}) for k, v in mean.items()})

    def add_mean(self, clients: Sequence[int], weight: float, mean: dict[str, Params]) -> None:
        """Takes the weighted mean of the uploads of these clients, and the sum of their weights."""
        self.used.extend(clients)
        self.weight += weight
        self._accumulate(mean, weight)

    def mean(self) -> dict[str, Params]:
        """The weighted mean of all uploads, without tables that came by rows."""
        if self.factor == self.weight:
            return dict(self.total or {})
        return {k: tree.scale(v, self.factor / self.weight) for k, v in (self.total or {}).items()}

    def merge(self, other: Tally) -> None:
        """Adds what another worker has gathered."""
        self.weight += other.weight
        self.uploads += other.uploads
        self.private += other.private
        self.used += other.used
        self.dropped += other.dropped
        self.upload_bytes += other.upload_bytes
        self.row_bytes_down += other.row_bytes_down
        self.id_bytes += other.id_bytes
        if other.row_sum is not None:
            self.row_sum = self.row_sum or RowSum()
            self.row_sum.merge(other.row_sum)
        if other.total is not None:
            self._accumulate(other.total, other.factor)

    def _add_rows(self, ids: dict[str, Tensor], weights: dict[str, Tensor], values: dict[str, Params]) -> None:
        self.row_sum = self.row_sum or RowSum()
        self.row_sum.add(ids, weights, values)

    def _accumulate(self, values: dict[str, Params], weight: float) -> None:
        if self.total is None:
            self.total, self.factor = values, weight
            return
        if self.factor != 1.0:
            self.total, self.factor = {k: tree.scale(v, self.factor) for k, v in self.total.items()}, 1.0
        for name, leaves in values.items():
            for leaf, x in leaves.items():
                self.total[name][leaf].add_(x, alpha=weight)


@dataclass(frozen=True)
class Execution:
    """A way to run a cohort: ``chunk`` = 0 runs clients one by one, else at most that many at once under vmap.

    So many ``threads`` work side by side, at most; one that is alone has all ``cores`` in each operator."""

    name: str
    chunk: int
    threads: int
    cores: int = 1

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
class Part:
    """Clients that run as one cohort, how they are run, and what they were sent: client i got ``messages[which[i]]``.

    All were sent the same message, unless the algorithm is ageless (:class:`mixfed.core.algorithm.Algorithm`).
    """

    messages: Sequence[Message]
    which: NDArray[np.int64]
    plan: Plan
    how: Execution

    @classmethod
    def alike(cls, message: Message, plan: Plan, how: Execution) -> Part:
        """A cohort in which everyone was sent the same."""
        return cls([message], np.zeros(len(plan), np.int64), plan, how)

    def units(self) -> list[slice]:
        """What a worker takes at a time: a client, or a vmapped chunk; one in factors begins from one message."""
        size = self.how.chunk or 1
        cuts = (np.flatnonzero(np.diff(self.which)) + 1).tolist() if self.how.name == "factored" else []
        ends = [*cuts, len(self.plan)]
        return [
            slice(i, min(i + size, end))
            for start, end in zip([0, *cuts], ends, strict=True)
            for i in range(start, end, size)
        ]


def execute(algorithm: Algorithm, parts: Sequence[Part], privates: PrivateStore, pool: Pool) -> list[list[Tally]]:
    """The client work of one or more cohorts, which share the workers; of each a tally for every message."""
    if algorithm.model.has_convolutions:
        parts = [part if part.how.chunk else replace(part, messages=_as_convolved(part.messages)) for part in parts]
    units = [(number, unit) for number, part in enumerate(parts) for unit in part.units()]
    workers = min(max(part.how.threads for part in parts), len(units))

    def work(worker: int) -> dict[tuple[int, int], Tally]:
        tallies: dict[tuple[int, int], Tally] = {}
        with torch.no_grad():
            for number, unit in units[worker::workers]:
                part = parts[number]

                def tally(message: int, number: int = number) -> Tally:
                    return tallies.setdefault((number, message), Tally(each=algorithm.uploads == "each"))

                who = f"Client {int(part.plan.clients[unit.start])} of '{part.plan.source}' cannot train"
                failure = (
                    (f"The {part.how.name} executor cannot run this model", "; choose loop")
                    if part.how.chunk
                    else (who, "")
                )
                unit_work = _vmapped if part.how.chunk else _one_client
                with explained(*failure):
                    unit_work(algorithm, part, unit, privates, tally)
        return tallies

    found: dict[tuple[int, int], Tally] = {}
    alone = max(part.how.cores for part in parts)
    for tallies in pool.run([partial(work, worker) for worker in range(workers)], alone):
        for place, tally in tallies.items():
            if place in found:
                found[place].merge(tally)
            else:
                found[place] = tally
    return [[found[number, m] for m in range(len(part.messages))] for number, part in enumerate(parts)]


def _as_convolved(messages: Sequence[Message]) -> list[Message]:
    return [replace(m, payload={k: _channels_last(v) for k, v in m.payload.items()}) for m in messages]


TallyOf = Callable[[int], Tally]
"""The tally of the clients that were sent the message of this number."""


def _one_client(algorithm: Algorithm, part: Part, unit: slice, privates: PrivateStore, tally_of: TallyOf) -> None:
    plan, number = part.plan, int(part.which[unit.start])
    message, tally = part.messages[number], tally_of(number)
    client = int(plan.clients[unit.start])
    batches = plan.client(unit.start, algorithm.model.device)
    if algorithm.model.has_convolutions:
        batches = replace(batches, fields=_channels_last(batches.fields, steps=True))
    own_rows: dict[str, Tensor] = {}
    if algorithm.rows:
        picked = rows.pick(algorithm.rows, message.payload, batches, [client])
        message, batches, own_rows = picked.given(message), picked.batches, picked.ids
        tally.row_bytes_down += picked.bytes_down
        tally.id_bytes += picked.bytes_of_ids
    private = privates.get(plan.source, client, message.first)
    if algorithm.model.has_convolutions:
        private = {part: _channels_last(leaves) for part, leaves in private.items()}
    upload, private = algorithm.client(message, private, batches)
    tally.upload_bytes += tree.nbytes(upload.values)
    tally.add(client, Upload(algorithm.arrive(upload.values), upload.weight, own_rows), private)


def _vmapped(algorithm: Algorithm, part: Part, unit: slice, privates: PrivateStore, tally_of: TallyOf) -> None:
    plan, which = part.plan, part.which[unit]
    numbers = np.unique(which).tolist()
    message, tally = part.messages[numbers[0]], tally_of(numbers[0])
    clients = [int(c) for c in plan.clients[unit]]
    batches = plan.chunk(unit, algorithm.model.device)
    private = privates.gather(plan.source, clients, message.first)
    picked = rows.pick(algorithm.rows, message.payload, batches, clients) if algorithm.rows else None
    batches = picked.batches if picked else batches
    if part.how.name == "factored":
        batches = replace(batches, kernel=factored)
    per_client: dict[str, Any] = {"fields": batches.fields, "key": batches.key}
    per_client |= {"steps": batches.steps, "examples": batches.examples, "rows": batches.rows}
    per_client |= {n: x for n, x in [("mask", batches.mask), ("active", batches.active)] if x is not None}

    sent = [part.messages[number].payload for number in which] if len(numbers) > 1 else []
    stacked = {
        k: {n: torch.stack([payload[k][n] for payload in sent]) for n in leaves}
        for k, leaves in (message.payload.items() if sent else ())
    }
    travelling, in_factors = 0, dict[str, dict[str, Factors]]()

    def one(
        given: dict[str, Any], private: Private, tables: dict[str, Params], stacked: dict[str, Params]
    ) -> tuple[dict[str, Params], Tensor, Private]:
        nonlocal travelling, in_factors
        received = rows.with_tables(message, tables) if tables else message
        if stacked:
            received = replace(message, payload=stacked)
        upload, private = algorithm.client(received, private, replace(batches, **given))
        travelling = tree.nbytes(rows.shared(algorithm.rows, upload.values))
        values, in_factors = apart(algorithm.arrive(upload.values), in_factors=algorithm.uploads == "sum")
        return values, upload.weight, apart(private, in_factors=False)[0]

    values, weight, private = over_clients(one, per_client, private, picked.payload if picked else {}, stacked)
    if sent:
        _add_groups(tally_of, which, clients, Upload(values, weight), private, travelling)
        return
    tally.upload_bytes += travelling * len(clients)
    if picked:
        tally.row_bytes_down += picked.bytes_down
        tally.id_bytes += picked.bytes_of_ids
        tally.upload_bytes += picked.bytes_of(values)
    tally.add_chunk(clients, Upload(values, weight), private, picked, in_factors)


def _add_groups(
    tally_of: TallyOf, which: NDArray[np.int64], clients: list[int], upload: Upload, private: Private, travelling: int
) -> None:
    """Adds a chunk whose clients were sent different messages; the means of all messages are one product a leaf."""
    numbers, owner = np.unique(which, return_inverse=True)
    members = [np.flatnonzero(owner == place) for place in range(len(numbers))]
    tallies = [tally_of(int(number)) for number in numbers]
    for tally, own in zip(tallies, members, strict=True):
        tally.upload_bytes += travelling * len(own)
    finite = bool(_finite({"up": upload.values, "kept": private}, batched=True).all())
    if tallies[0].each or not finite:
        for i, client in enumerate(clients):
            tallies[owner[i]].add(client, Upload(_index(upload.values, i), upload.weight[i]), _index(private, i))
        return
    weights = torch.zeros(len(numbers), len(clients), dtype=upload.weight.dtype, device=upload.weight.device)
    weights[torch.from_numpy(owner), torch.arange(len(clients))] = upload.weight
    means = {k: {n: _weighted_mean(weights, x) for n, x in v.items()} for k, v in upload.values.items()}
    for place, (tally, own, weight) in enumerate(zip(tallies, members, weights.sum(1).tolist(), strict=True)):
        theirs = slice(int(own[0]), int(own[-1]) + 1)
        tally.add_mean([clients[i] for i in own], weight, _index(means, place))
        tally.private.append((clients[theirs], _index(private, theirs)))


def _wide(x: Tensor) -> Tensor:
    """Sums are kept in 32 bits at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _weighted_mean(weights: Tensor, x: Tensor) -> Tensor:
    """The mean of x over its first dimension, or one for each row of weights."""
    x = _wide(x)
    weights = weights.to(x.dtype)
    mean: Tensor = torch.tensordot(weights / weights.sum(-1, keepdim=True), x, 1)
    return mean


def _finite(values: tree.Tree, batched: bool = False) -> Tensor:
    """Whether there are only finite numbers: a sum is finite exactly where all its terms are (and it can hold them)."""
    sums = [x.reshape(len(x), -1).sum(1) if batched else x.sum() for x in tree.leaves(values)]
    return torch.isfinite(torch.stack(sums).sum(0)) if sums else torch.ones((1,) if batched else (), dtype=torch.bool)


def _index(trees: dict[str, Params], i: int | slice) -> dict[str, Params]:
    return {name: {leaf: x[i] for leaf, x in part.items()} for name, part in trees.items()}


def _channels_last(params: Params, *, steps: bool = False) -> Params:
    """Image-shaped tensors in the memory layout that CPU convolutions like; the values are the same."""
    if steps:  # [steps, batch, channels, height, width]: every step's batch on its own
        return {n: _each_channels_last(x) if x.ndim == 5 else x for n, x in params.items()}
    return {n: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for n, x in params.items()}


def _each_channels_last(x: Tensor) -> Tensor:
    """Even where one channel makes both layouts the same, the strides tell convolutions which one to go on with."""
    y = x.flatten(0, 1).clone(memory_format=torch.channels_last)
    return y.as_strided(x.shape, (x.shape[1] * y.stride(0), *y.stride()))


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
