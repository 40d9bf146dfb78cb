"""Matrices that clients have in common but for a few outer products of their own.

A client's weight after some steps of SGD is the shared W, less its own examples' inputs aⱼ and output gradients dⱼ:

    Wᵢ = bᵢ·W + gᵢ·G + Σⱼ cᵢⱼ·dᵢⱼ·aᵢⱼᵀ

with G a correction that all clients add to their gradients. :class:`Factors` is such a matrix for each client of a
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.models.products import linear

_FEW = 1 << 20
"""Numbers that are sooner put together than multiplied block by block."""


class Pairs(NamedTuple):
    """Inputs [clients, pairs, in] and output gradients [clients, pairs, out], whose outer products are meant."""

    inputs: Tensor
    gradients: Tensor

    def flat(self) -> Pairs:
        """The same without the dimension over clients."""
        return Pairs(self.inputs.flatten(0, 1), self.gradients.flatten(0, 1))

    @classmethod
    def joined(cls, several: Sequence[Pairs]) -> Pairs:
        """One after the other."""
        return several[0] if len(several) == 1 else cls(*(torch.cat(parts, 1) for parts in zip(*several, strict=True)))


@dataclass(frozen=True)
class Factors:
    """A matrix for each client of a chunk: Σₛ shareᵢₛ·sharedₛ + Σⱼ coefficientᵢⱼ·dᵢⱼ·aᵢⱼᵀ.

    ``share`` is [clients, shared] and ``coefficients`` [clients, all pairs].
    """

    shared: tuple[Tensor, ...]
    share: NDArray[np.float64]
    pairs: tuple[Pairs, ...]
    coefficients: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.share)

    def of(self, some: slice) -> Factors:
        """Those of some of the clients."""
        pairs = tuple(Pairs(inputs[some], gradients[some]) for inputs, gradients in self.pairs)
        return Factors(self.shared, self.share[some], pairs, self.coefficients[some])

    def dense(self) -> Tensor:
        """The matrices themselves: [clients, out, in]."""
        like = self.shared[0]
        found = like.new_zeros(()).expand(len(self), *like.shape)
        for share, matrix in zip(self.share.T, self.shared, strict=True):
            if share.any():
                found = torch.addcmul(found, self._tensor(share).view(-1, 1, 1), matrix)
        for inputs, scaled in self._scaled():
            found = torch.baddbmm(found, scaled.mT, inputs)
        return found

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σᵢ wᵢ·Wᵢ: one product for all pairs whose inputs are side by side in memory."""
        total, own = None, weights.double().cpu().numpy()
        for inputs, scaled in _side_by_side([pairs.flat() for pairs in self._scaled(own)]):
            one = linear(scaled.T, inputs.T)
            total = one if total is None else total.add_(one)
        total = torch.zeros_like(self.shared[0]) if total is None else total
        for share, matrix in zip(own @ self.share, self.shared, strict=True):
            if share:
                total.add_(matrix, alpha=float(share))
        return total

    def inner(self, matrix: Tensor) -> Tensor:
        """⟨Wᵢ, matrix⟩ of each client."""
        total = self._tensor(self.share @ np.array([float((m * matrix).sum()) for m in self.shared]))
        for inputs, scaled in self._scaled():
            total = total + (linear(inputs, matrix) * scaled).sum((1, 2))
        return total

    def squares(self) -> Tensor:
        """‖Wᵢ‖² of each client, from inner products of its pairs."""
        total: Tensor | float = self._squares_of_shared() if self.share.any() else 0.0
        blocks = self._scaled()
        if sum(inputs.numel() for inputs, _ in blocks) <= _FEW:
            blocks = [Pairs.joined(blocks)] if blocks else []
        for i, (inputs, scaled) in enumerate(blocks):
            for j, (others, theirs) in enumerate(blocks[: i + 1]):
                products = torch.bmm(inputs, others.mT) * torch.bmm(scaled, theirs.mT)
                total = total + (1 if i == j else 2) * products.sum((1, 2))
        return total if isinstance(total, Tensor) else self._tensor(np.zeros(len(self)))

    def _squares_of_shared(self) -> Tensor:
        """What the shared matrices bring to the squares: their own products, and those with the pairs."""
        there = np.flatnonzero(self.share.any(0)).tolist()
        shared = [self.shared[place] for place in there]
        gram = np.array([[float((m * n).sum()) for n in shared] for m in shared]).reshape(len(shared), len(shared))
        total = self._tensor(((self.share[:, there] @ gram) * self.share[:, there]).sum(1))
        own = replace(self, share=np.zeros_like(self.share))
        for place, matrix in zip(there, shared, strict=True):
            total = total + 2 * self._tensor(self.share[:, place]) * own.inner(matrix)
        return total

    def times(self, factor: NDArray[np.float64] | float) -> Factors:
        """All times a number, or each client's times its own."""
        own = np.reshape(factor, (-1, 1))
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is found in what comes up
            return replace(self, share=self.share * own, coefficients=self.coefficients * own)

    def plus(self, place: int, amount: float) -> Factors:
        """Σ + amount·shared[place]."""
        share = self.share.copy()
        share[:, place] += amount
        return replace(self, share=share)

    def _tensor(self, numbers: NDArray[np.float64]) -> Tensor:
        like = self.shared[0]
        return torch.from_numpy(numbers).to(like.device, like.dtype)

    def _scaled(self, weights: NDArray[np.float64] | None = None) -> list[Pairs]:
        """The pairs, with their coefficients (and the clients' weights) taken into the gradients."""
        found, start = [], 0
        scale = self._tensor(self.coefficients if weights is None else self.coefficients * weights[:, None])
        for inputs, gradients in self.pairs:
            own = scale[:, start : start + inputs.shape[1], None]
            found.append(Pairs(inputs, gradients * own))
            start += inputs.shape[1]
        return found


def _side_by_side(blocks: Sequence[Pairs]) -> list[Pairs]:
    """The same flat pairs in fewer blocks: one where the inputs of one block end where those of the next begin, as
    those of a network's first layer do, which are the batches themselves."""
    found: list[list[Pairs]] = []
    for block in blocks:
        last = found[-1][-1].inputs if found else None
        if last is not None and last.is_contiguous() and block.inputs.is_contiguous() and _follows(last, block.inputs):
            found[-1].append(block)
        else:
            found.append([block])
    return [
        Pairs(
            row[0].inputs.as_strided((sum(len(b.inputs) for b in row), row[0].inputs.shape[1]), row[0].inputs.stride()),
            torch.cat([b.gradients for b in row]) if len(row) > 1 else row[0].gradients,
        )
        for row in found
    ]


def _follows(first: Tensor, second: Tensor) -> bool:
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and first.storage_offset() + first.numel() == second.storage_offset()
