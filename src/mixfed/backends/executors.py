"""How a cohort's client work is executed: one client after another, or many at once under vmap.

Both run on a pool of threads with one intra-op thread each (PyTorch's kernels release the interpreter's lock), both
cut the cohort into units that worker w of T takes as w, w + T, w + 2T, …, and both add weighted uploads up as they
come. The order of every addition is fixed, so a result does not depend on which thread is faster.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mixfed import rows, tree
from mixfed.batches import Plan
from mixfed.core import Algorithm, Message, Private, Upload
from mixfed.errors import explained
from mixfed.private import PrivateStore
from mixfed.rows import Picked, RowSum
from mixfed.tree import Params

T = TypeVar("T")


@dataclass
class Tally:
    """The weighted sum of uploads so far (and the uploads themselves where an algorithm wants each)."""

    each: bool
    total: dict[str, Params] | None = None
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

    def add_chunk(self, clients: Sequence[int], upload: Upload, private: Private, picked: Picked | None = None) -> None:
        """Takes the uploads of a vmapped chunk: a leading dimension over its clients everywhere.

        Tables that came by rows are apart, as ``picked`` has them.
        """
        finite = _finite({"up": upload.values, "kept": private}, batched=True).expand(len(clients))
        good = finite.tolist()
        if self.each or not all(good):
            for i, client in enumerate(clients):
                one = Upload(_index(upload.values, i), upload.weight[i])
                self.add(client, one if picked is None else picked.with_rows(one, upload.values, i), _index(private, i))
            return
        self.used.extend(clients)
        self.private.append((list(clients), private))
        self.weight += float(upload.weight.sum())
        values = upload.values
        if picked is not None:
            weights = {t: upload.weight[owner] for t, owner in picked.owner.items()}
            values, tables = picked.apart(values)
            for leaves in tables.values():
                for t, x in leaves.items():
                    wide = _wide(x)
                    leaves[t] = wide.mul_(weights[t].view(-1, *(1,) * (x.ndim - 1)).to(wide.dtype))
            self._add_rows(picked.ids, weights, tables)
        self._accumulate({k: {n: _weighted_sum(upload.weight, x) for n, x in v.items()} for k, v in values.items()})

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
            self._accumulate(other.total)

    def _add_rows(self, ids: dict[str, Tensor], weights: dict[str, Tensor], values: dict[str, Params]) -> None:
        self.row_sum = self.row_sum or RowSum()
        self.row_sum.add(ids, weights, values)

    def _accumulate(self, values: dict[str, Params], weight: float = 1.0) -> None:
        if self.total is None:
            self.total = {k: tree.scale(v, weight) for k, v in values.items()} if weight != 1.0 else values
            return
        for name, leaves in values.items():
            for leaf, x in leaves.items():
                self.total[name][leaf].add_(x, alpha=weight)


@dataclass(frozen=True)
class Execution:
    """A way to run a cohort: ``chunk`` = 0 runs clients one by one, else that many at once under vmap."""

    name: str
    chunk: int
    threads: int

    def __str__(self) -> str:
        how = f"chunks of {self.chunk}" if self.chunk else "one client at a time"
        return f"{self.name} ({how}, {self.threads} thread{'s' if self.threads > 1 else ''})"


class Pool:
    """Threads that outlive a round, each with one intra-op thread; work that fits one worker runs right here."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, works: list[Callable[[], T]]) -> list[T]:
        if len(works) == 1:
            return [works[0]()]
        return [future.result() for future in [self._pool.submit(work) for work in works]]


@dataclass(frozen=True)
class Part:
    """Clients that were sent the same message, and how they are run."""

    message: Message
    plan: Plan
    how: Execution

    def units(self) -> list[slice]:
        """What a worker takes at a time: a client, or a vmapped chunk."""
        size = self.how.chunk or 1
        return [slice(i, min(i + size, len(self.plan))) for i in range(0, len(self.plan), size)]


def execute(algorithm: Algorithm, parts: Sequence[Part], privates: PrivateStore, pool: Pool) -> list[Tally]:
    """The client work of one or more cohorts, which share the workers; a tally for each."""
    if algorithm.model.has_convolutions:
        parts = [part if part.how.chunk else replace(part, message=_as_convolved(part.message)) for part in parts]
    units = [(number, unit) for number, part in enumerate(parts) for unit in part.units()]
    workers = min(max(part.how.threads for part in parts), len(units))

    def work(worker: int) -> dict[int, Tally]:
        tallies: dict[int, Tally] = {}
        with torch.no_grad():
            for number, unit in units[worker::workers]:
                part = parts[number]
                tally = tallies.setdefault(number, Tally(each=algorithm.uploads == "each"))
                who = f"Client {int(part.plan.clients[unit.start])} of '{part.plan.source}' cannot train"
                failure = ("The vmap executor cannot run this model", "; choose loop") if part.how.chunk else (who, "")
                unit_work = _vmapped if part.how.chunk else _one_client
                with explained(*failure):
                    unit_work(algorithm, part.message, part.plan, unit, privates, tally)
        return tallies

    found: dict[int, Tally] = {}
    for tallies in pool.run([lambda w=w: work(w) for w in range(workers)]):  # type: ignore[misc]
        for number, tally in tallies.items():
            if number in found:
                found[number].merge(tally)
            else:
                found[number] = tally
    return [found[number] for number in range(len(parts))]


def _as_convolved(message: Message) -> Message:
    return replace(message, payload={k: _channels_last(v) for k, v in message.payload.items()})


def _one_client(
    algorithm: Algorithm, message: Message, plan: Plan, unit: slice, privates: PrivateStore, tally: Tally
) -> None:
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


def _vmapped(
    algorithm: Algorithm, message: Message, plan: Plan, unit: slice, privates: PrivateStore, tally: Tally
) -> None:
    clients = [int(c) for c in plan.clients[unit]]
    batches = plan.chunk(unit, algorithm.model.device)
    private = privates.gather(plan.source, clients, message.first)
    picked = rows.pick(algorithm.rows, message.payload, batches, clients) if algorithm.rows else None
    batches = picked.batches if picked else batches
    per_client: dict[str, Any] = {"fields": batches.fields, "key": batches.key}
    per_client |= {"steps": batches.steps, "examples": batches.examples, "rows": batches.rows}
    per_client |= {n: x for n, x in [("mask", batches.mask), ("active", batches.active)] if x is not None}

    travelling = 0

    def one(
        given: dict[str, Any], private: Private, tables: dict[str, Params]
    ) -> tuple[dict[str, Params], Tensor, Private]:
        nonlocal travelling
        received = rows.with_tables(message, tables) if tables else message
        upload, private = algorithm.client(received, private, replace(batches, **given))
        travelling = tree.nbytes(rows.shared(algorithm.rows, upload.values))
        return algorithm.arrive(upload.values), upload.weight, private

    values, weight, private = torch.vmap(one)(per_client, private, picked.payload if picked else {})
    tally.upload_bytes += travelling * len(clients)
    if picked:
        tally.row_bytes_down += picked.bytes_down
        tally.id_bytes += picked.bytes_of_ids
        tally.upload_bytes += picked.bytes_of(values)
    tally.add_chunk(clients, Upload(values, weight), private, picked)


def _wide(x: Tensor) -> Tensor:
    """Sums are kept in 32 bits at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _weighted_sum(weights: Tensor, x: Tensor) -> Tensor:
    x = _wide(x)
    total: Tensor = torch.tensordot(weights.to(x.dtype), x, 1)
    return total


def _finite(values: tree.Tree, batched: bool = False) -> Tensor:
    """Whether there are only finite numbers: a sum is finite exactly where all its terms are (and it can hold them)."""
    sums = [x.reshape(len(x), -1).sum(1) if batched else x.sum() for x in tree.leaves(values)]
    return torch.isfinite(torch.stack(sums).sum(0)) if sums else torch.ones((1,) if batched else (), dtype=torch.bool)


def _index(trees: dict[str, Params], i: int) -> dict[str, Params]:
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
    mallopt(mmap_threshold, 32 << 20)
    mallopt(trim_threshold, 512 << 20)
