"""Aggregation: weighted sums of uploads, which threads, processes and networks share.

Three operations: ``add`` an upload (or the mean of several), ``merge`` two sums, and the ``result``, which is a reply.
Nothing here looks into a single update: whether its numbers are finite and its norm is within a bound is checked where
it is made, on the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mixfed.core import tree
from mixfed.core.algorithm import Reply, Upload
from mixfed.core.jobs import Jobs
from mixfed.core.tree import Params
from mixfed.transforms.rows.select import shared
from mixfed.transforms.rows.sums import RowSum

Trees = dict[str, Params]


@dataclass
class WeightedSum:
    """Σ wᵢ·vᵢ of the uploads so far, which is factor·total, with Σ wᵢ and the clients they are from.

    So the update of a lone client, or of a single chunk, is its own mean to the last bit. Rows of tables are summed by
    themselves.
    """

    total: Trees | None = None
    factor: float = 1.0
    weight: float = 0.0
    clients: list[int] = field(default_factory=list)
    rows: RowSum | None = None

    def add(self, client: int, upload: Upload) -> None:
        """Adds the upload of one client."""
        weight = float(upload.weight)
        values = {k: {n: wide(x) for n, x in v.items()} for k, v in upload.values.items()}
        if upload.rows:
            tables = {k: {n: x for n, x in v.items() if n in upload.rows} for k, v in values.items()}
            self.add_rows(upload.rows, {t: torch.full((len(i),), weight) for t, i in upload.rows.items()}, tables)
            values = shared(upload.rows, values)
        self.add_mean([client], weight, values)

    def add_mean(self, clients: Sequence[int], weight: float, mean: Trees) -> None:
        """Adds the weighted mean of the uploads of these clients, and the sum of their weights."""
        self.clients.extend(clients)
        self.weight += weight
        self._accumulate(mean, weight)

    def add_rows(
        self,
        ids: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        values: Trees,
        places: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Adds rows of tables (:meth:`mixfed.transforms.rows.sums.RowSum.add`)."""
        self.rows = self.rows or RowSum()
        self.rows.add(ids, weights, values, places)

    def merge(self, other: WeightedSum) -> None:
        """Adds what another worker has summed."""
        self.clients += other.clients
        self.weight += other.weight
        if other.rows is not None:
            self.rows = self.rows or RowSum()
            self.rows.merge(other.rows)
        if other.total is not None:
            self._accumulate(other.total, other.factor)

    def result(self, source: str) -> Reply | None:
        """The weighted mean of all uploads; None where there was none."""
        if not self.clients:
            return None
        values = dict(self.total or {})
        if self.factor != self.weight:
            values = {k: tree.scale(v, self.factor / self.weight) for k, v in values.items()}
        if self.rows is None:
            return Reply(values, self.weight, tuple(self.clients), source)
        ids, weights, sums = self.rows.result()
        for part, tables in sums.items():
            values[part] = values.get(part, {}) | {t: x.mul_(1.0 / self.weight) for t, x in tables.items()}
        touched = tree.scale(weights, 1.0 / self.weight)
        return Reply(values, self.weight, tuple(self.clients), source, rows=ids, touched=touched)

    def _accumulate(self, values: Trees, weight: float) -> None:
        if self.total is None:
            self.total, self.factor = values, weight
            return
        if self.factor != 1.0:
            self.total, self.factor = {k: tree.scale(v, self.factor) for k, v in self.total.items()}, 1.0
        for name, leaves in values.items():
            for leaf, x in leaves.items():
                self.total[name][leaf].add_(x, alpha=weight)


def single(client: int, upload: Upload, source: str) -> Reply:
    """The reply of one client, for an algorithm that wants each."""
    touched = {t: torch.ones(len(i), device=i.device) for t, i in upload.rows.items()}
    return Reply(upload.values, float(upload.weight), (client,), source, rows=upload.rows, touched=touched)


def in_order(replies: list[Reply], jobs: Jobs) -> list[Reply]:
    """Replies of single clients in the order of their jobs."""
    place = {client: i for i, client in enumerate(jobs.clients.tolist())}
    return sorted(replies, key=lambda reply: place[reply.clients[0]])


def wide(x: Tensor) -> Tensor:
    """Sums are kept in 32 bits at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def weighted_mean(weights: Tensor, x: Tensor) -> Tensor:
    """The mean of x over its first dimension, or one for each row of weights."""
    x = wide(x)
    weights = weights.to(x.dtype)
    share = weights / weights.sum(-1, keepdim=True)
    return torch.matmul(share, x.reshape(len(x), -1)).view((*share.shape[:-1], *x.shape[1:]))


@dataclass(frozen=True)
class Bundle:
    """The leaves of a chunk [clients, …], of which the small ones stand side by side in a single tensor, so that one
    operator serves all of them. ``tied`` says which these are: their parts, names and shapes of a client."""

    values: Trees
    tied: tuple[tuple[str, str, torch.Size], ...] = ()

    @classmethod
    def of(cls, values: Trees) -> Bundle:
        """Ties up what is small."""
        small = [(k, n, x) for k, v in values.items() for n, x in v.items() if _is_small(x)]
        if len(small) < 2:
            return cls(values)
        names = {(k, n) for k, n, _ in small}
        others = {k: {n: x for n, x in v.items() if (k, n) not in names} for k, v in values.items()}
        together = torch.cat([x.reshape(len(x), -1) for *_, x in small], 1)
        return cls({_TIED: {_TIED: together}, **others}, tuple((k, n, x.shape[1:]) for k, n, x in small))

    def mean(self, weights: Tensor) -> Trees:
        """The weighted means of the leaves, each by itself again."""
        means = {k: {n: weighted_mean(weights, x) for n, x in v.items()} for k, v in self.values.items()}
        together = means.pop(_TIED)[_TIED] if self.tied else weights
        sizes = [shape.numel() for *_, shape in self.tied]
        for (k, n, shape), x in zip(self.tied, torch.split(together, sizes) if sizes else (), strict=True):
            means[k][n] = x.view(shape)
        return means


_TIED = ""
SMALL = 1024
"""Numbers of a leaf up to which an operator takes longer to begin than to do its work on a chunk."""


def _is_small(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.numel() <= SMALL * len(x)
