"""The atlas of Feddle: client updates as directions (anchors), rows that are only ever multiplied with vectors.

A·g and Aᵀ·c are taken where the rows are, so that they stay out of the autograd graph and may live elsewhere than the
model: in main memory, or in a file that is mapped into it. The scaling to the median norm is a factor for each row and
is never applied to the rows themselves, and a new anchor is written over the one it replaces: memory is atlas × model,
nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixfed.core.storage import Place, check_place, room
from mixfed.core.tree import Params
from mixfed.errors import require_memory

BLOCK = 4096
_AT_ONCE = 1 << 20
_UNSEARCHED = float("inf")


@dataclass(frozen=True)
class Atlas:
    """At most ``size`` anchors with their norms, scores and the rounds in which they came.

    ``rows`` is [blocks, size, length]: one block of the whole ``width`` in full precision, or blocks of 4,096 columns
    in 8 bits, each row of which has a scale (1 in full precision). A score of ∞ marks an anchor that has not been
    through a search yet.
    """

    size: int
    width: int
    rows: Tensor
    scales: Tensor
    norms: Tensor
    scores: Tensor
    born: Tensor

    @classmethod
    def empty(
        cls, size: int, width: int, bits: int, device: torch.device, dtype: torch.dtype, place: Place = "device"
    ) -> Atlas:
        """No anchors yet, for vectors of this width, in 8 or 32 bits (a float64 model's: 64)."""
        check_place(place, "Anchors")
        blocks, length, stored = (-(-width // BLOCK), BLOCK, torch.int8) if bits == 8 else (1, width, dtype)
        if place != "disk":
            needed = blocks * size * length * stored.itemsize
            require_memory(f"An atlas of {size} anchors", needed, "choose a smaller one")
        rows = room((blocks, size, length), stored, device, place)
        none = torch.zeros(0, device=device, dtype=dtype)
        return cls(size, width, rows, torch.ones(blocks, size, device=rows.device, dtype=dtype), none, none, none)

    def __len__(self) -> int:
        return len(self.norms)

    @property
    def fresh(self) -> Tensor:
        """Which anchors have not been through a search yet."""
        return torch.isinf(self.scores)

    def with_updates(self, updates: list[Tensor], round: int, *, by_score: bool = True) -> tuple[Atlas, list[int]]:
        """The atlas with new anchors, and the place of each (−1: no room). Rows are written in place, so the atlas as
        it was is lost.

        A full atlas gives up the anchor of lowest score (the first of equals), or without ``by_score`` the one that
        came first; an anchor that has not been through a search yet cannot be replaced.
        """
        rank = self.scores if by_score else torch.where(self.fresh, _UNSEARCHED, self.born)
        leaving = [i for i in torch.argsort(rank, stable=True).tolist() if not bool(self.fresh[i])]
        free = [*range(len(self), self.size), *leaving][: len(updates)]
        length = max([len(self), *(place + 1 for place in free)])
        norms, scores, born = (_longer(x, length) for x in (self.norms, self.scores, self.born))
        for update, place in zip(updates, free, strict=False):
            norms[place], scores[place], born[place] = self._write(update, place), _UNSEARCHED, float(round)
        places = free + [-1] * (len(updates) - len(free))
        return replace(self, norms=norms, scores=scores, born=born), places

    def factors(self, norms: Tensor | None = None, *, normalise: bool = True) -> Tensor:
        """median(‖a‖)/‖aₘ‖ for each anchor, or for vectors with these ``norms``; a zero anchor stays zero, and where
        the median is zero nothing changes."""
        norms, middle = self.norms if norms is None else norms, torch.quantile(self.norms, 0.5)
        if not normalise or not bool(middle > 0):
            return torch.ones_like(norms)
        return torch.where(norms > 0, middle / norms.clamp(min=torch.finfo(middle.dtype).tiny), 0.0)

    def combine(self, coefficients: Tensor, onto: Tensor) -> Tensor:
        """x + Σ cₘ·aₘ, x the vector ``onto``: the scales of 8-bit rows go into the coefficients."""
        if self._whole is not None:
            moved = torch.addmv(onto.to(self._whole.device), self._whole.T, coefficients.to(self._whole.device))
            return moved.to(coefficients.device)
        weights = self.scales[:, None, : len(self)] * coefficients.to(self.scales.device)
        start = self._in_blocks(onto)
        parts = [torch.baddbmm(start[some, None], weights[some], rows)[:, 0] for some, rows in self._read()]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.view(-1)[: self.width].to(coefficients.device)

    def project(self, vector: Tensor) -> Tensor:
        """⟨aₘ, vector⟩ for each anchor."""
        if self._whole is not None:
            return torch.mv(self._whole, vector.to(self._whole.device)).to(vector.device)
        columns = self._in_blocks(vector)[:, None]  # times the transposed: many times faster than rows × columns here
        parts = [torch.bmm(columns[some], rows.transpose(1, 2))[:, 0] for some, rows in self._read()]
        return (torch.cat(parts) * self.scales[:, : len(self)]).sum(0).to(vector.device)

    def kept_at(self, place: Place, device: torch.device) -> Atlas:
        """The atlas with its anchors where they belong, which a checkpoint does not know, in memory of their own: sums
        may round differently where the rows of a file do not begin at an even address."""
        rows = room(tuple(self.rows.shape), self.rows.dtype, device, place).copy_(self.rows)
        rest = {name: getattr(self, name).to(device) for name in ("norms", "scores", "born")}
        return replace(self, rows=rows, scales=self.scales.to(rows.device), **rest)

    def tree(self) -> dict[str, Any]:
        """The atlas as a tree."""
        return {n: getattr(self, n) for n in ("size", "width", "rows", "scales", "norms", "scores", "born")}

    @cached_property
    def _whole(self) -> Tensor | None:
        """The anchors as a matrix, which they are in full precision."""
        return self.rows[0, : len(self)] if self.rows.dtype.is_floating_point else None

    def _read(self) -> Iterator[tuple[slice, Tensor]]:
        """Some blocks at a time, as few as stay in the cache while 8-bit rows are made numbers again."""
        blocks, _, length = self.rows.shape
        step = max(1, _AT_ONCE // max(1, len(self) * length))
        for i in range(0, blocks, step):
            some = slice(i, i + step)
            yield some, self.rows[some, : len(self)].to(self.scales.dtype)

    def _in_blocks(self, vector: Tensor) -> Tensor:
        """A vector as [blocks, length], where the rows are; the last block is filled up with zeros."""
        blocks, _, length = self.rows.shape
        vector, missing = vector.to(self.scales), blocks * length - self.width
        return (F.pad(vector, (0, missing)) if missing else vector).view(blocks, length)

    def _write(self, update: Tensor, place: int) -> Tensor:
        """Stores an anchor and returns its norm, which is that of what was stored."""
        row = self._in_blocks(update)
        if not self.rows.dtype.is_floating_point:
            scale = row.abs().amax(1) / 127
            row = (row / scale.clamp(min=torch.finfo(scale.dtype).tiny)[:, None]).round()
            self.scales[:, place] = scale
        self.rows[:, place] = row.to(self.rows.dtype)
        return (row * self.scales[:, place, None]).square().sum().sqrt()


def flat(params: Params, names: tuple[str, ...]) -> Tensor:
    """The leaves with these names as one vector."""
    return torch.cat([params[n].reshape(-1) for n in names])


def unflat(vector: Tensor, params: Params, names: tuple[str, ...]) -> Params:
    """The vector as leaves with these names, in the shapes that they have in ``params``."""
    parts = torch.split(vector, [params[n].numel() for n in names])
    return {n: part.view(params[n].shape) for n, part in zip(names, parts, strict=True)}


def _longer(table: Tensor, length: int) -> Tensor:
    """A copy with room for so many entries."""
    return torch.cat([table, table.new_zeros(length - len(table))])
