"""Sums of rows: what clients that exchange rows sent up, added up row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mixfed.transforms.rows.distinct import distinct
from mixfed.transforms.rows.lookups import Trees


@dataclass
class RowSum:
    """Σᵢ wᵢ·rowsᵢ over clients, kept by the rows that were touched, and Σ wᵢ of the clients that touched each."""

    _pending: dict[str, list[tuple[Tensor, Tensor, Trees]]] = field(default_factory=dict)

    def add(self, ids: Mapping[str, Tensor], weights: Mapping[str, Tensor], values: Trees) -> None:
        """Adds rows that already are multiplied by their clients' weights."""
        for t in ids:
            mine = {part: {t: leaves[t]} for part, leaves in values.items() if t in leaves}
            pending = self._pending.setdefault(t, [])
            pending.append((ids[t], weights[t].double(), mine))
            if len(pending) > 2 and sum(len(p[0]) for p in pending[1:]) > max(4 * len(pending[0][0]), _MANY):
                self._pending[t] = [_compact(pending)]

    def merge(self, other: RowSum) -> None:
        """Adds what another worker has gathered."""
        for t, pending in other._pending.items():
            self._pending.setdefault(t, []).extend(pending)

    def compacted(self) -> RowSum:
        """The same sum with every row once: what has to travel of it."""
        return RowSum({t: [_compact(pending)] for t, pending in self._pending.items()})

    def result(self) -> tuple[dict[str, Tensor], dict[str, Tensor], Trees]:
        """By table: the ids that were touched (ascending), the weights of their clients, and the sums."""
        ids: dict[str, Tensor] = {}
        weights: dict[str, Tensor] = {}
        values: Trees = {}
        for t, pending in self._pending.items():
            ids[t], weights[t], sums = _compact(pending)
            for part, leaves in sums.items():
                values.setdefault(part, {}).update(leaves)
        return ids, weights, values


_MANY = 1 << 19


def _compact(pending: list[tuple[Tensor, Tensor, Trees]]) -> tuple[Tensor, Tensor, Trees]:
    """The same sum with every row once."""
    ids, place = distinct(torch.cat([p[0] for p in pending]))
    places = torch.split(place, [len(p[0]) for p in pending])
    weight = ids.new_zeros(len(ids), dtype=pending[0][1].dtype)
    sums = {
        part: {t: x.new_zeros(len(ids), *x.shape[1:]) for t, x in leaves.items()}
        for part, leaves in pending[0][2].items()
    }
    for at, (_, w, values) in zip(places, pending, strict=True):
        weight.index_add_(0, at, w)
        for part, leaves in values.items():
            for t, x in leaves.items():
                flat = x.reshape(len(x), -1)  # scatter_add_ is several times as fast as index_add_ here
                sums[part][t].view(len(ids), -1).scatter_add_(0, at[:, None].expand_as(flat), flat)
    return ids, weight, sums
