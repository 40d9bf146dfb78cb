"""Meets the uses of weights in a loss that is computed under vmap, and does them in factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from mixfed.backends.simulator.factored.weight import Weight, pays
from mixfed.models import vmap
from mixfed.models.products import linear, linears


@dataclass(frozen=True)
class Use:
    """A use of a weight in a step: its inputs, and where the gradient of its outputs is to be had."""

    name: str
    inputs: Tensor
    edge: GradientEdge


class Watch(TorchFunctionMode):
    """While active, F.linear with a weight that is known by identity is computed from factors, and ``uses`` collects
    its inputs. Weights that are met in another place, or too often, are ``unsuited``."""

    def __init__(self, names: dict[int, str], weights: Mapping[str, Weight], clients: int, steps: int) -> None:
        super().__init__()
        self.names, self.weights, self.clients, self.steps = names, weights, clients, steps
        self.uses: list[Use] = []
        self.unsuited: set[str] = set()
        self.ranks = dict.fromkeys(weights, 0)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func is linear:
            return self._linear(*args, **kwargs)
        if (func in _BY_NUMBER and not kwargs.get("inplace")) or (
            func in _LOSSES and kwargs.get("reduction") == "none"
        ):
            found = self._by_example(func, args, kwargs)
            if found is not None:
                return found
        for x in (*args, *kwargs.values()):
            for one in x if type(x) in (list, tuple) else (x,):
                if id(one) in self.names and func not in _HARMLESS:
                    self.unsuited.add(self.names[id(one)])
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name = self.names.get(id(weight))
        own = name is None and vmap.is_at_this_level(weight) and vmap.is_at_this_level(input)
        if not (own if name is None else self._is_suited(name, input)):
            return linear(input, weight, bias)
        x, each = vmap.made_of(input)
        b, each_b = vmap.made_of(bias) if bias is not None else (None, False)
        w, each_w = vmap.made_of(weight)
        if name is None and not each_w:
            return linear(input, weight, bias)
        with vmap.outside():
            x = x if each else x.expand(self.clients, *x.shape)
            rows = x.reshape(self.clients, -1, x.shape[-1])
            b = b.expand(self.clients, -1) if b is not None and not each_b else b
            if name is None:
                z = linears(rows, w, b)
            else:
                z = self.weights[name].applied(rows)
                z = z if b is None else z + b.unsqueeze(1)
                if not z.requires_grad:
                    z = z.requires_grad_().clone()  # what comes next may write into it, but not into a leaf
                self.uses.append(Use(name, rows.detach(), get_gradient_edge(z)))
            z = z.view(*x.shape[:-1], -1)
        return vmap.each(z)

    def _by_example(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The function of all clients' examples in a row, in a fraction of what the operators of vmap take."""
        fewest = 2 if func is F.cross_entropy else 1  # its first dimension is examples only if there is another
        if not all(isinstance(x, Tensor) and vmap.is_at_this_level(x) for x in args) or args[0].ndim < fewest:
            return None
        plain = [vmap.made_of(x) for x in args]
        if not all(each for _, each in plain) or any(isinstance(x, Tensor) for x in kwargs.values()):
            return None
        with vmap.outside():
            found = func(*(x.flatten(0, 1) for x, _ in plain), **kwargs)
            found = found.view(self.clients, -1, *found.shape[1:])
        return vmap.each(found)

    def _is_suited(self, name: str, x: Tensor) -> bool:
        """Whether this use leaves the weight in factors; x is one client's."""
        shape = tuple(self.weights[name].start.shape)
        self.ranks[name] += self.steps * (x.numel() // x.shape[-1] if x.numel() else 0)
        suited = (
            vmap.is_at_this_level(x) and x.dtype == self.weights[name].start.dtype and pays(shape, self.ranks[name])
        )
        if not suited:
            self.unsuited.add(name)
        return suited


_BY_NUMBER: frozenset[Any] = frozenset(
    [F.relu, torch.relu, Tensor.relu, torch.tanh, Tensor.tanh, torch.sigmoid, Tensor.sigmoid, F.gelu, F.silu]
)
_LOSSES: frozenset[Any] = frozenset([F.binary_cross_entropy_with_logits, F.cross_entropy])
_HARMLESS: frozenset[Any] = frozenset(
    [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point]
    + [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")]
)
