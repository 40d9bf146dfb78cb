"""What clients of a cohort did, as it is gathered by the workers that run them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mixfed.backends.aggregate import Bundle, WeightedSum, wide
from mixfed.backends.simulator.factored import Factors
from mixfed.backends.work import all_fit, fits, norm_of, norms_of
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Private, Upload
from mixfed.core.faults import median
from mixfed.core.tree import Params
from mixfed.transforms.rows.select import RowDelivery

SAMPLE = 5
FAR = 3.0
FactoredLeaves = dict[str, dict[str, Factors]]
"""Leaves of a chunk's uploads that are in factors, by part and name."""


@dataclass
class Gathered:
    """What clients that were sent the same message did: the sum of their uploads, or the uploads themselves where an
    algorithm wants ``each``, what they keep (``kept`` are the names of its parts), the norms of their updates, who was
    dropped, what it weighs, and how much work it was."""

    each: bool
    bound: float | None = None
    sum: WeightedSum = field(default_factory=WeightedSum)
    uploads: list[tuple[int, Upload]] = field(default_factory=list)
    private: list[tuple[list[int], Private]] = field(default_factory=list)
    kept: tuple[str, ...] = ()
    dropped: list[int] = field(default_factory=list)
    norms: dict[int, float] = field(default_factory=dict)
    upload_bytes: int = 0
    row_bytes_down: int = 0
    id_bytes: int = 0
    own_bytes: int = 0
    examples: int = 0
    flops: int = 0

    @classmethod
    def by(cls, algorithm: Algorithm) -> Gathered:
        """Nothing yet, to be gathered as the algorithm wants it."""
        return cls(algorithm.uploads == "each", algorithm.bound)

    def add(self, client: int, upload: Upload, private: Private, norm: float) -> None:
        """Takes what one client did, unless a number in it is not finite or its norm is beyond the bound."""
        self.norms[client] = norm
        if not fits(norm, self.bound):
            self.dropped.append(client)
            return
        self.private.append(([client], tree.map_leaves(lambda x: x[None], private)))
        if self.each:
            self.uploads.append((client, upload))
        else:
            self.sum.add(client, upload)

    def add_chunk(
        self,
        clients: Sequence[int],
        upload: Upload,
        private: Private,
        picked: RowDelivery | None = None,
        factors: FactoredLeaves | None = None,
    ) -> None:
        """Takes the uploads of a vmapped chunk: a leading dimension over its clients everywhere.

        Tables that came by rows are apart, as ``picked`` has them, and so are leaves in ``factors``, whose mean is one
        product. Their numbers are all finite where those of the mean are.
        """
        factors, total = factors or {}, float(upload.weight.sum())
        means = {k: {n: wide(x.weighted_sum(upload.weight / total)) for n, x in v.items()} for k, v in factors.items()}
        bundle = Bundle.of(upload.values if picked is None else picked.apart(upload.values)[0])
        norms = norms_of(
            Upload(bundle.values if picked is None else upload.values, upload.weight),
            private,
            picked.real() if picked else None,
        )
        seen = self._add_factors(norms, factors, means)
        if self.each or not seen or not all_fit(norms, self.bound):
            for i, client in enumerate(clients):
                one = Upload(_with_dense(index(upload.values, i), factors, i), upload.weight[i])
                one = one if picked is None else picked.with_rows(one, upload.values, i)
                own = index(private, i)
                self.add(client, one, own, norm_of(one, own) if factors else norms[i])
            return
        self.norms |= dict(zip(clients[:seen], norms[:seen], strict=True))
        self.private.append((list(clients), private))
        if picked is not None:
            weights = {t: upload.weight.index_select(0, owner) for t, owner in picked.owner.items()}
            self.sum.add_rows(picked.ids, weights, picked.apart(upload.values)[1], picked.flat)
        mean = bundle.mean(upload.weight)
        self.sum.add_mean(clients, total, {k: v | means.get(k, {}) for k, v in mean.items()})

    def _add_factors(self, norms: list[float], factors: FactoredLeaves, means: Mapping[str, Params]) -> int:
        """Adds what is in factors to the norms of a chunk: of how many clients, the first ones.

        A few are enough where there is no bound. If the mean is much longer than they are, somebody's update is absurd,
        or not finite: then none is told here, so that all are looked at.
        """
        leaves = [x for part in factors.values() for x in part.values()]
        if not leaves:
            return len(norms)
        seen = len(norms) if self.bound is not None else min(len(norms), SAMPLE)
        squares = torch.stack([x.of(slice(seen)).squares() for x in leaves]).sum(0).clamp(min=0).tolist()
        norms[:seen] = [math.hypot(norm, math.sqrt(square)) for norm, square in zip(norms, squares, strict=False)]
        longest = math.hypot(*(float(torch.linalg.vector_norm(x)) for part in means.values() for x in part.values()))
        return seen if longest <= FAR * (median(norms[:seen]) or norms[0]) else 0

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
        self.norms |= other.norms
        self.upload_bytes += other.upload_bytes
        self.row_bytes_down += other.row_bytes_down
        self.id_bytes += other.id_bytes
        self.examples += other.examples
        self.flops += other.flops
        self.kept = self.kept or other.kept
        self.own_bytes = max(self.own_bytes, other.own_bytes)


def _with_dense(values: dict[str, Params], factors: FactoredLeaves, i: int) -> dict[str, Params]:
    """One client's values with the matrices that are in factors. Those of a whole chunk may not fit the memory."""
    dense = {k: {n: x.of(slice(i, i + 1)).dense()[0] for n, x in v.items()} for k, v in factors.items()}
    return {k: v | dense.get(k, {}) for k, v in values.items()}


def index(trees: dict[str, Params], i: int | slice) -> dict[str, Params]:
    """The trees of one client of a chunk, or of several."""
    return {name: {leaf: x[i] for leaf, x in part.items()} for name, part in trees.items()}
