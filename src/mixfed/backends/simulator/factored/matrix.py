"""What stands for a client's matrix under vmap as long as it is only added up: its factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mixfed.backends.simulator.factored.factors import Factors
from mixfed.core.tree import Params
from mixfed.models import vmap


class Factored(Tensor):
    """One client's matrix under vmap, in factors.

    Adding or taking away a shared matrix, and multiplying by a number, leave it in factors, and its norm needs no more
    than them. Anything else is done to the dense matrix, which is made when it is first needed; what is written into
    stays dense.
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


def _norm(x: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    if x.factors is None or args or kwargs:
        return None
    with vmap.outside():
        found = x.factors.squares().clamp(min=0).sqrt()
    return vmap.each(found)


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
    torch.linalg.vector_norm: _norm,
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
