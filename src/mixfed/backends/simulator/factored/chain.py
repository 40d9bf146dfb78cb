"""Networks that are a chain of linear layers and functions of single numbers, with their gradient written out.

Such a network is most of what clients train in factors, and its operators are so small that the bookkeeping of modules,
vmap and automatic differentiation takes longer than their numbers do. Here a step of all clients of a chunk is one
product or two for each layer, there and back. The criterion, which may be anything, is computed under vmap as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mixfed.backends.simulator.factored.factors import Pairs
from mixfed.backends.simulator.factored.weight import Weight
from mixfed.core.model import Model
from mixfed.core.tree import Params
from mixfed.models import products
from mixfed.models.products import linears

aten = torch.ops.aten


@dataclass(frozen=True)
class Linear:
    """The names of a linear layer's parameters."""

    weight: str
    bias: str | None


@dataclass(frozen=True)
class Bend:
    """A function of single numbers, and its gradient from the gradient of its outputs and its outputs."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_BENDS: dict[type[nn.Module], Bend] = {
    nn.ReLU: Bend(torch.relu, lambda d, y: aten.threshold_backward(d, y, 0)),
    nn.Tanh: Bend(torch.tanh, aten.tanh_backward),
    nn.Sigmoid: Bend(torch.sigmoid, aten.sigmoid_backward),
}
_KNOWN: WeakKeyDictionary[Model, Chain | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Chain:
    """The layers of a network from its inputs to its outputs, in which each parameter has one place."""

    layers: tuple[Linear | Bend, ...]
    flattens: bool

    @classmethod
    def of(cls, model: Model) -> Chain | None:
        """The model as a chain, if it is one and all of it trains."""
        if model not in _KNOWN:
            _KNOWN[model] = _chain(model)
        return _KNOWN[model]

    @property
    def first(self) -> str:
        """The name of the first layer's weight."""
        return next(layer.weight for layer in self.layers if isinstance(layer, Linear))

    def suits(self, x: Tensor, params: Params) -> bool:
        """Whether the network's layers take these inputs [clients, steps, batch, …] example by example."""
        return x.dtype == params[self.first].dtype and x.ndim >= 4 and (self.flattens or x.ndim == 4)

    def passed(self, x: Tensor, dense: Params, weights: Mapping[str, Weight], ready: Tensor | None) -> list[Tensor]:
        """What goes into each layer, x [clients, batch, inputs] first, and the outputs of the last.

        ``ready`` is x·Wᵀ of the first layer with the shared W, where that is known already.
        """
        passed = [x]
        for layer in self.layers:
            x = passed[-1]
            if isinstance(layer, Bend):
                passed.append(layer.forward(x))
                continue
            bias = None if layer.bias is None else dense[layer.bias]
            if layer.weight in weights:
                z = weights[layer.weight].applied(x, ready if len(passed) == 1 else None)
                passed.append(z if bias is None else z + bias.unsqueeze(1))
            else:
                passed.append(linears(x, dense[layer.weight], bias))
        return passed

    def gradient(
        self, d: Tensor, passed: list[Tensor], dense: Params, weights: Mapping[str, Weight]
    ) -> tuple[Params, dict[str, list[Pairs]]]:
        """From the gradient of the outputs: that of dense parameters, and the pairs of the others."""
        found: Params = {}
        pairs: dict[str, list[Pairs]] = {}
        for place in reversed(range(len(self.layers))):
            layer, x = self.layers[place], passed[place]
            if isinstance(layer, Bend):
                d = layer.backward(d, passed[place + 1])
                continue
            if layer.bias is not None:
                found[layer.bias] = d.sum(1)
            if layer.weight in weights:
                pairs[layer.weight] = [Pairs(x, d)]
            else:
                found[layer.weight] = linears(d.mT, x.mT)
            if place:
                d = weights[layer.weight].back(d) if layer.weight in weights else _back(d, dense[layer.weight])
        return found, pairs


def _back(d: Tensor, w: Tensor) -> Tensor:
    return d * w if w.shape[1] == 1 else linears(d, w.mT)


def _chain(model: Model) -> Chain | None:
    network = model.network()
    found: list[Linear | Bend] = []
    names: dict[int, str] = {id(p): n for n, p in network.named_parameters()}
    flattens = False
    for number, layer in enumerate(_in_a_row(network) if model.takes_x else ()):
        if _is_changed(layer):
            return None
        if type(layer) is products.Linear:
            found.append(Linear(names[id(layer.weight)], None if layer.bias is None else names[id(layer.bias)]))
        elif type(layer) in _BENDS:
            found.append(_BENDS[type(layer)])
        elif type(layer) is nn.Flatten and not number and (layer.start_dim, layer.end_dim) == (1, -1):
            flattens = True
        else:
            return None
    used = [n for layer in found if isinstance(layer, Linear) for n in (layer.weight, layer.bias) if n is not None]
    whole = sorted(used) == sorted(model.trainable) and not model.buffers
    return Chain(tuple(found), flattens) if used and whole and isinstance(found[0], Linear) else None


def _in_a_row(module: nn.Module) -> list[nn.Module]:
    """The layers of nested sequences."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not _is_changed(module):
        return [layer for part in module for layer in _in_a_row(part)]
    return [module]


def _is_changed(module: Any) -> bool:
    """Whether somebody has hung something on this very module."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)
