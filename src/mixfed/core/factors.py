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

import torch
from torch import Tensor

from mixfed.core.tree import Params
from mixfed.models import vmap


class Pairs(NamedTuple):
    """Inputs [clients, pairs, in] and output gradients [clients, pairs, out], whose outer products are meant."""

    inputs: Tensor
    gradients: Tensor

    @classmethod
    def joined(cls, several: Sequence[Pairs]) -> Pairs:
        """One after the other."""
        return several[0] if len(several) == 1 else cls(*(torch.cat(parts, 1) for parts in zip(*several, strict=True)))


@dataclass(frozen=True)
class Factors:
    """A matrix for each client of a chunk: Σₛ shareᵢₛ·sharedₛ + Σⱼ coefficientᵢⱼ·dᵢⱼ·aᵢⱼᵀ.

    ``share`` is [clients, shared] and ``coefficients`` [clients, all pairs], both in 64 bits and in main memory.
    """

    shared: tuple[Tensor, ...]
    share: Tensor
    pairs: tuple[Pairs, ...]
    coefficients: Tensor

    def __len__(self) -> int:
        return len(self.share)

    def dense(self) -> Tensor:
        """The matrices themselves: [clients, out, in]."""
        found = self._of_shared(self.share)
        for inputs, scaled in self._scaled():
            found = torch.baddbmm(found, scaled.mT, inputs)
        return found

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σᵢ wᵢ·Wᵢ: one product for each block of pairs."""
        found = self._of_shared((weights.to(self.share) @ self.share)[None])[0]
        for inputs, scaled in self._scaled(weights):
            found = torch.addmm(found, scaled.flatten(0, 1).T, inputs.flatten(0, 1))
        return found

    def inner(self, matrix: Tensor) -> Tensor:
        """⟨Wᵢ, matrix⟩ of each client."""
        found = self.share @ torch.stack([(m * matrix).sum() for m in self.shared]).to(self.share)
        total = found.to(matrix)
        for inputs, scaled in self._scaled():
            total = total + (torch.matmul(inputs, matrix.T) * scaled).sum((1, 2))
        return total

    def squares(self) -> Tensor:
        """‖Wᵢ‖² of each client, from inner products of its pairs."""
        gram = torch.stack([torch.stack([(m * n).sum() for n in self.shared]) for m in self.shared]).to(self.share)
        total = ((self.share @ gram) * self.share).sum(1).to(self.shared[0])
        own = replace(self, share=torch.zeros_like(self.share))
        for place, matrix in enumerate(self.shared):
            total = total + 2 * self.share[:, place].to(total) * own.inner(matrix)
        blocks = self._scaled()
        for i, (inputs, scaled) in enumerate(blocks):
            for j, (others, theirs) in enumerate(blocks[: i + 1]):
                products = torch.bmm(inputs, others.mT) * torch.bmm(scaled, theirs.mT)
                total = total + (1 if i == j else 2) * products.sum((1, 2))
        return total

    def sums(self) -> Tensor:
        """The sum of the numbers of each client's matrix, which is finite where they are."""
        total = self.share @ torch.stack([m.sum() for m in self.shared]).to(self.share)
        found = total.to(self.shared[0])
        for inputs, scaled in self._scaled():
            found = found + (inputs.sum(2) * scaled.sum(2)).sum(1)
        return found

    def of(self, clients: Tensor) -> Factors:
        """The same of these clients alone."""
        pairs = tuple(Pairs(p.inputs[clients], p.gradients[clients]) for p in self.pairs)
        return Factors(self.shared, self.share[clients.cpu()], pairs, self.coefficients[clients.cpu()])

    def times(self, factor: Tensor | float) -> Factors:
        """All times a number, or each client's times its own."""
        own = factor.to(self.share).view(-1, 1) if isinstance(factor, Tensor) else factor
        return replace(self, share=self.share * own, coefficients=self.coefficients * own)

    def plus(self, place: int, amount: float) -> Factors:
        """Σ + amount·shared[place]."""
        share = self.share.clone()
        share[:, place] += amount
        return replace(self, share=share)

    def _of_shared(self, share: Tensor) -> Tensor:
        """Σₛ share·sharedₛ, without the work for what nobody has."""
        like = self.shared[0]
        found = like.new_zeros(()).expand(len(share), *like.shape)
        for place, matrix in enumerate(self.shared):
            own = share[:, place]
            if bool(own.any()):
                found = torch.addcmul(found, own.to(like).view(-1, 1, 1), matrix)
        return found

    def _scaled(self, weights: Tensor | None = None) -> list[Pairs]:
        """The pairs, with their coefficients (and the clients' weights) taken into the gradients."""
        found, start = [], 0
        for inputs, gradients in self.pairs:
            own = self.coefficients[:, start : start + inputs.shape[1]]
            if weights is not None:
                own = own * weights.to(own).view(-1, 1)
            found.append(Pairs(inputs, gradients * own.to(gradients).unsqueeze(-1)))
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
        y = vmap.made_of(y)[0]
    with vmap.outside():
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
