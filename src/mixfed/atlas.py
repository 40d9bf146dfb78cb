"""The atlas of Feddle: client updates as directions (anchors), a matrix with a row for each.

Rows are only ever multiplied with vectors, A·g and Aᵀ·c, block of columns by block of columns, so that they stay out of
the autograd graph and can be stored in 8 bits. The median normalisation is a factor for each row and is never applied
to the rows themselves: memory is atlas × model, nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixfed.errors import InputError
from mixfed.tree import Params

BLOCK = 4096
_UNSEARCHED = float("inf")


@dataclass(frozen=True)
class Atlas:
    """At most ``size`` anchors with their norms, scores and the rounds in which they came.

    A score of ∞ marks an anchor that has not been through a search yet. ``scales`` are those of 8-bit rows, one for
    each block of 4,096 columns; rows in full precision have none.
    """

    size: int
    rows: Tensor
    scales: Tensor
    norms: Tensor
    scores: Tensor
    born: Tensor

    @classmethod
    def empty(cls, size: int, width: int, bits: int, device: torch.device, dtype: torch.dtype) -> Atlas:
        """No anchors yet, for vectors of this width, in 8 or 32 bits (a float64 model's: 64)."""
        if size < 1:
            raise InputError(f"An atlas needs room for at least 1 anchor, not {size}.")
        if bits not in (8, 32):
            raise InputError(f"Anchors are stored in 8 or 32 bits, not in {bits}.")
        blocks = -(-width // BLOCK) if bits == 8 else 0
        none = torch.zeros(0, device=device, dtype=dtype)
        rows = torch.zeros((0, width), device=device, dtype=torch.int8 if bits == 8 else dtype)
        return cls(size, rows, none.new_zeros((0, blocks)), none, none, none)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fresh(self) -> Tensor:
        """Which anchors have not been through a search yet."""
        return torch.isinf(self.scores)

    def with_updates(self, updates: list[Tensor], round: int, *, by_score: bool = True) -> tuple[Atlas, list[int]]:
        """The atlas with new anchors, and the place of each (−1: no room).

        A full atlas gives up the anchor of lowest score (the first of equals), or without ``by_score`` the one that
        came first; an anchor that has not been through a search yet cannot be replaced.
        """
        room, places = self.size - len(self), []
        rank = (self.scores if by_score else self.born).clone()
        rank[self.fresh] = _UNSEARCHED
        leaving = [int(i) for i in torch.argsort(rank, stable=True) if not bool(self.fresh[i])]
        for k in range(len(updates)):
            if k < room:
                places.append(len(self) + k)
            else:
                places.append(leaving[k - room] if k - room < len(leaving) else -1)
        used = [(u, p) for u, p in zip(updates, places, strict=True) if p >= 0]
        if not used:
            return self, places
        longest = max(len(self), 1 + max(p for _, p in used))
        tables = {n: _longer(getattr(self, n), longest) for n in ("rows", "scales", "norms", "scores", "born")}
        for update, place in used:
            row, scale = self._stored(update)
            tables["rows"][place], tables["scales"][place] = row, scale
            tables["norms"][place] = torch.linalg.vector_norm(self._read(row, scale))
            tables["scores"][place], tables["born"][place] = _UNSEARCHED, float(round)
        return Atlas(self.size, **tables), places

    def factors(self, *, normalise: bool = True) -> Tensor:
        """median(‖a‖)/‖aₘ‖ for each anchor; a zero anchor stays zero, and where the median is zero nothing changes."""
        middle = torch.quantile(self.norms, 0.5)
        if not normalise or not bool(middle > 0):
            return torch.ones_like(self.norms)
        return torch.where(self.norms > 0, middle / self.norms.clamp(min=torch.finfo(middle.dtype).tiny), 0.0)

    def combine(self, coefficients: Tensor) -> Tensor:
        """Σ cₘ·aₘ."""
        parts = [(coefficients[None] @ rows)[0] for rows in self._blocks()]
        return torch.cat(parts)

    def project(self, vector: Tensor) -> Tensor:
        """⟨aₘ, vector⟩ for each anchor."""
        total, start = torch.zeros_like(self.norms), 0
        for rows in self._blocks():
            total = total + (rows @ vector[start : start + rows.shape[1], None])[:, 0]
            start += rows.shape[1]
        return total

    def tree(self) -> dict[str, Any]:
        """The atlas as a tree."""
        return {n: getattr(self, n) for n in ("size", "rows", "scales", "norms", "scores", "born")}

    def _blocks(self) -> Iterator[Tensor]:
        if not self.rows.dtype.is_floating_point:
            for i in range(0, self.rows.shape[1], 16 * BLOCK):
                scales = self.scales[:, i // BLOCK : i // BLOCK + 16]
                yield self._read(self.rows[:, i : i + 16 * BLOCK], scales)
        else:
            yield self.rows

    def _stored(self, update: Tensor) -> tuple[Tensor, Tensor]:
        if self.rows.dtype.is_floating_point:
            return update.to(self.rows.dtype), self.scales.new_zeros(0)
        padded = torch.nn.functional.pad(update, (0, -len(update) % BLOCK)).view(-1, BLOCK)
        scale = padded.abs().amax(1) / 127
        whole = (padded / scale.clamp(min=torch.finfo(scale.dtype).tiny)[:, None]).round().to(torch.int8)
        return whole.view(-1)[: len(update)], scale.to(self.scales.dtype)

    def _read(self, rows: Tensor, scales: Tensor) -> Tensor:
        if rows.dtype.is_floating_point:
            return rows
        return rows.to(scales.dtype) * scales.repeat_interleave(BLOCK, dim=-1)[..., : rows.shape[-1]]


def flat(params: Params, names: tuple[str, ...]) -> Tensor:
    """The leaves with these names as one vector."""
    return torch.cat([params[n].reshape(-1) for n in names])


def added(params: Params, names: tuple[str, ...], vector: Tensor) -> Params:
    """The leaves with these names plus their parts of the vector."""
    parts = torch.split(vector, [params[n].numel() for n in names])
    return {n: params[n] + part.view(params[n].shape) for n, part in zip(names, parts, strict=True)}


def _longer(table: Tensor, length: int) -> Tensor:
    """A copy with room for so many rows."""
    longer = table.new_zeros((length, *table.shape[1:]))
    longer[: len(table)] = table
    return longer
