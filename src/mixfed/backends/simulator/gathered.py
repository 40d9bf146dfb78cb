"""What clients of a cohort did, as it is gathered by the workers that run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mixfed.backends.aggregate import WeightedSum, weighted_mean, wide
from mixfed.backends.simulator.factored import Factors
from mixfed.backends.work import all_finite, is_finite
from mixfed.core import tree
from mixfed.core.algorithm import Private, Upload
from mixfed.core.tree import Params
from mixfed.transforms.rows.select import RowDelivery

FactoredLeaves = dict[str, dict[str, Factors]]
"""Leaves of a chunk's uploads that are in factors, by part and name."""


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
        factors, share = factors or {}, upload.weight / upload.weight.sum()
        means = {k: {n: wide(x.weighted_sum(share)) for n, x in v.items()} for k, v in factors.items()}
        finite = is_finite(upload, private, batched=True).all()
        if self.each or not bool(finite & all_finite(means)):
            values = {k: v | {n: x.dense() for n, x in factors.get(k, {}).items()} for k, v in upload.values.items()}
            for i, client in enumerate(clients):
                one = Upload(index(values, i), upload.weight[i])
                self.add(client, one if picked is None else picked.with_rows(one, values, i), index(private, i))
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
        self.sum.add_mean(clients, float(upload.weight.sum()), {k: v | means.get(k, {}) for k, v in mean.items()})

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


def index(trees: dict[str, Params], i: int | slice) -> dict[str, Params]:
    """The trees of one client of a chunk, or of several."""
    return {name: {leaf: x[i] for leaf, x in part.items()} for name, part in trees.items()}
