"""Matrices that clients have in common but for a few outer products of their own.

A client's weight after some steps of SGD is the shared W, less its own examples' inputs aⱼ and output gradients dⱼ:

    Wᵢ = bᵢ·W + gᵢ·G + Σⱼ cᵢⱼ·dᵢⱼ·aᵢⱼᵀ

with G a correction that all clients add to their gradients. :class:`Factors` is such a matrix for each client of a
chunk, and :class:`Factored` stands for one client's under vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.core.tree import Params
from mixfed.models import vmap


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
            total = torch.mm(scaled.T, inputs) if total is None else total.addmm_(scaled.T, inputs)
        total = torch.zeros_like(self.shared[0]) if total is None else total
        for share, matrix in zip(own @ self.share, self.shared, strict=True):
            if share:
                total.add_(matrix, alpha=float(share))
        return total

    def inner(self, matrix: Tensor) -> Tensor:
        """⟨Wᵢ, matrix⟩ of each client."""
        total = self._tensor(self.share @ np.array([float((m * matrix).sum()) for m in self.shared]))
        for inputs, scaled in self._scaled():
            total = total + (torch.matmul(inputs, matrix.T) * scaled).sum((1, 2))
        return total

    def squares(self) -> Tensor:
        """‖Wᵢ‖² of each client, from inner products of its pairs."""
        gram = np.array([[float((m * n).sum()) for n in self.shared] for m in self.shared])
        total = self._tensor(((self.share @ gram) * self.share).sum(1))
        own = replace(self, share=np.zeros_like(self.share))
        for share, matrix in zip(self.share.T, self.shared, strict=True):
            if share.any():
                total = total + 2 * self._tensor(share) * own.inner(matrix)
        blocks = self._scaled()
        for i, (inputs, scaled) in enumerate(blocks):
            for j, (others, theirs) in enumerate(blocks[: i + 1]):
                products = torch.bmm(inputs, others.mT) * torch.bmm(scaled, theirs.mT)
                total = total + (1 if i == j else 2) * products.sum((1, 2))
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


class Factored(Tensor):
    """One client's matrix under vmap, in factors.

    Adding or taking away a shared matrix, and multiplying by a number, leave it in factors. Anything else is done to
    the dense matrix, which is made when it is first needed; what is written into stays dense.
    """

    factors: Factors | None
    _dense: Tensor | None

    @staticmethod
    def __new__(cls, factors: Factors) -> Factored:
        like = factors.shared[0]
        self: Factored = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        self.factors, self._dense = factors, None
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        linear = _LINEAR.get(func)
        found = linear(*args, **kwargs) if linear else None
        if found is not None:
            return found
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], Factored) and name.endswith("_") and not name.endswith("__"):
            args[0].dense()
            args[0].factors = None
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_made_dense(args), **_made_dense(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"A matrix in factors was given to {func}; make it dense() first.")

    def dense(self) -> Tensor:
        """The same as an ordinary tensor."""
        if self._dense is None:
            assert self.factors is not None
            with vmap.outside():
                found = self.factors.dense()
            self._dense = vmap.each(found)
        return self._dense


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


def _made_dense(given: Any) -> Any:
    if isinstance(given, Factored):
        return given.dense()
    if isinstance(given, dict):
        return {n: _made_dense(x) for n, x in given.items()}
    return type(given)(_made_dense(x) for x in given) if type(given) in (list, tuple) else given


def _plus(x: Any, y: Any, alpha: float = 1, *, sign: int = 1) -> Tensor | None:
    if not isinstance(x, Factored) or x.factors is None:
        return None
    for place, matrix in enumerate(x.factors.shared):
        if y is matrix:
            return Factored(x.factors.plus(place, sign * alpha))
    return None


def _minus(x: Any, y: Any, alpha: float = 1) -> Tensor | None:
    return _plus(x, y, alpha, sign=-1)


def _times(x: Any, y: Any) -> Tensor | None:
    if not isinstance(x, Factored):
        x, y = y, x
    if not isinstance(x, Factored) or x.factors is None:
        return None
    if isinstance(y, Tensor):
        if isinstance(y, Factored) or y.ndim or y.requires_grad:
            return None
        plain = vmap.made_of(y)[0]
        with vmap.outside():
            y = plain.detach().double().cpu().numpy()
    return Factored(x.factors.times(y))


def _negative(x: Any) -> Tensor | None:
    return _times(x, -1.0)


def _over(x: Any, y: Any) -> Tensor | None:
    return _times(x, 1.0 / y) if not isinstance(y, Factored) else None


def _same(x: Any) -> Tensor | None:
    return None if x.factors is None else Factored(x.factors)


def _cast(x: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    return x if x.factors is not None and args == (x.dtype,) and not kwargs else None


_ABOUT: frozenset[Any] = frozenset(
    [Tensor.numel, Tensor.element_size, Tensor.size, Tensor.dim, Tensor.is_floating_point]
    + [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")]
)
_LINEAR: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys([torch.add, Tensor.add, Tensor.__add__], _plus),
    **dict.fromkeys([torch.sub, Tensor.sub, Tensor.__sub__], _minus),
    **dict.fromkeys([torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__], _times),
    **dict.fromkeys([torch.div, Tensor.div, Tensor.__truediv__], _over),
    **dict.fromkeys([torch.neg, Tensor.neg, Tensor.__neg__], _negative),
    **dict.fromkeys([torch.clone, Tensor.clone], _same),
    Tensor.detach: lambda x: x,
    Tensor.to: _cast,
}


def apart(values: dict[str, Params], *, in_factors: bool) -> tuple[dict[str, Params], dict[str, dict[str, Factors]]]:
    """The trees without what is in factors, and that; or, if factors are of no use, all of it dense."""
    dense: dict[str, Params] = {part: {} for part in values}
    found: dict[str, dict[str, Factors]] = {}
    for part, leaves in values.items():
        for n, x in leaves.items():
            if in_factors and isinstance(x, Factored) and x.factors is not None:
                found.setdefault(part, {})[n] = x.factors
            else:
                dense[part][n] = x.dense() if isinstance(x, Factored) else x
    return dense, found
