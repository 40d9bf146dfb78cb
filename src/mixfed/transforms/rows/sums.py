"""Sums of rows: what clients that exchange rows sent up, added up row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from mixfed.transforms.rows.distinct import distinct, grouped
from mixfed.transforms.rows.lookups import Trees


@dataclass(frozen=True)
class _Rows:
    """Rows of one table: row i has the id ``ids[i]`` and counts ``factor[i]`` times (None: once); the clients that it
    is from weigh ``weights[i]``. It stands at ``places[i]`` of the values (None: at i)."""

    ids: Tensor
    weights: Tensor
    values: Trees
    factor: Tensor | None = None
    places: Tensor | None = None


@dataclass
class RowSum:
    """Σᵢ wᵢ·rowsᵢ over clients, kept by the rows that were touched, and Σ wᵢ of the clients that touched each."""

    _pending: dict[str, list[_Rows]] = field(default_factory=dict)

    def add(
        self,
        ids: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        values: Trees,
        places: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Adds rows, each with the weight of its client; they are the values at these places, or all of them."""
        for t in ids:
            mine = {part: {t: leaves[t]} for part, leaves in values.items() if t in leaves}
            pending = self._pending.setdefault(t, [])
            pending.append(_Rows(ids[t], weights[t].double(), mine, weights[t], places[t] if places else None))
            if len(pending) > 2 and sum(len(p.ids) for p in pending[1:]) > max(4 * len(pending[0].ids), _MANY):
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
            once = _compact(pending)
            ids[t], weights[t] = once.ids, once.weights
            for part, leaves in once.values.items():
                values.setdefault(part, {}).update(leaves)
        return ids, weights, values


_MANY = 1 << 19


def _compact(pending: list[_Rows]) -> _Rows:
    """The same sum with every row once: the rows of an id are a bag, whose weighted sum is taken as it is read."""
    if len(pending) == 1 and pending[0].factor is None:
        return pending[0]
    ids, number = distinct(torch.cat([p.ids for p in pending]))
    order, starts = grouped(number, len(ids))
    weight = torch.bincount(number, torch.cat([p.weights for p in pending]), len(ids))
    factor = torch.cat([p.weights.new_ones(len(p.ids)) if p.factor is None else p.factor for p in pending])
    factor = factor.index_select(0, order)
    sums: Trees = {}
    for part, leaves in pending[0].values.items():
        for t in leaves:
            x, places = _together(pending, part, t)
            flat = x.reshape(len(x), -1)
            bags = F.embedding_bag(
                order if places is None else places.index_select(0, order),
                flat,
                starts,
                mode="sum",
                per_sample_weights=factor.to(flat.dtype),
            )
            sums.setdefault(part, {})[t] = bags.view(len(ids), *x.shape[1:])
    return _Rows(ids, weight, sums)


def _together(pending: list[_Rows], part: str, table: str) -> tuple[Tensor, Tensor | None]:
    """The values of all rows in at least 32 bits, and their places in them."""
    values = [p.values[part][table] for p in pending]
    wide = torch.promote_types(values[0].dtype, torch.float32)
    if len(pending) == 1:
        return values[0].to(wide), pending[0].places
    each = [x if p.places is None else x.index_select(0, p.places) for x, p in zip(values, pending, strict=True)]
    return torch.cat(each).to(wide), None
