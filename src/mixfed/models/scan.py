"""A recurrent layer over a whole sequence as one function with a gradient of its own, alone and under vmap.

A sequence is many small steps, so that PyTorch's bookkeeping for each operator of each step takes longer than its
numbers do. Here a step is a few operators for all networks at once (:mod:`mixfed.models.cells`), and what does not hang
on the step before is one product for all steps: the inputs' share in the gates, and the gradients of weights.

Shapes: ``x`` [N, T, B, I], weights [N, G·H, I] and [N, G·H, H], biases [N, G·H], carried tensors [N, B, H]. Without
vmap N counts directions. Under vmap a cohort multiplies N where clients have weights of their own. Where the weights
are everyone's, the cohort is one large batch, and only the gradients of weights are taken client by client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mixfed.models.cells import CELLS, Run

WEIGHTS = 4
"""The weights of inputs and of states, and their biases."""


def scan(cell: str, x: Tensor, weights: Sequence[Tensor], carry: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The states after every step, and the last carried tensors."""
    states, *others = _applied(_Scan, cell, x, *weights, *carry)
    return states, others[: CELLS[cell].carried]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(name: str, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        cell, (w_in, weight, b_in, bias), carry = CELLS[name], given[:WEIGHTS], given[WEIGHTS:]
        gates = torch.baddbmm((b_in + cell.added(bias))[:, None], x.flatten(1, 2), w_in.mT)
        run = cell.forward(gates.view(*x.shape[:3], -1), carry, weight, bias)
        return run.states, *run.last, *run.trace

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name, *tensors = inputs
        carried = CELLS[ctx.name].carried
        states, trace = output[0], output[1 + carried :]
        ctx.save_for_backward(*tensors, states, *trace)
        ctx.mark_non_differentiable(*trace)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        carried = CELLS[ctx.name].carried
        return None, *_applied(_Back, ctx.name, None, *gradients[: 1 + carried], *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], name: str, *given: Tensor) -> Any:
        carried, clients, dims = CELLS[name].carried, info.batch_size, in_dims[1:]
        places = [2, *[0] * WEIGHTS, *[1] * carried]
        folded = all(dim is None for dim in dims[1 : 1 + WEIGHTS])
        made = _folded(given, dims, places, clients) if folded else _stacked(given, dims, clients)
        found = _applied(_Scan, name, *made)
        places = [2, *[1] * carried, *[2] * (len(found) - 1 - carried)]
        return _apart(found, places if folded else [0] * len(found), clients)


class _Back(torch.autograd.Function):
    """The gradients of a scan's tensors. Where its batch is made of so many ``clients``, each has a gradient of the
    weights."""

    @staticmethod
    def forward(name: str, clients: int | None, *given: Tensor) -> tuple[Tensor, ...]:
        cell = CELLS[name]
        (d_states, *d_last), rest = given[: 1 + cell.carried], given[1 + cell.carried :]
        (x, w_in, weight, _, _), carry = rest[: 1 + WEIGHTS], rest[1 + WEIGHTS :][: cell.carried]
        states, *trace = rest[1 + WEIGHTS + cell.carried :]
        found = cell.backward(d_states, tuple(d_last), carry, weight, Run(states, (), tuple(trace)))
        first, d_x, start = carry[0][:, None], x.new_zeros(x.shape), 0
        for d in found.given:
            d_x.flatten(1, 2).baddbmm_(d.flatten(1, 2), w_in[:, start : start + d.shape[-1]])
            start += d.shape[-1]
        d_w_in = torch.cat([_product(d, x, clients) for d in found.given], -2)
        d_weight = _product(found.fed[:, 1:], states[:, :-1], clients) + _product(found.fed[:, :1], first, clients)
        d_b_in = torch.cat([_total(d, clients) for d in found.given], -1)
        return d_x, d_w_in, d_weight, d_b_in, _total(found.fed, clients), *found.first

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("The gradient of a recurrent layer cannot itself be differentiated.")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], name: str, parts: int | None, *given: Tensor) -> Any:
        carried, clients, dims = CELLS[name].carried, info.batch_size, in_dims[2:]
        places = [2, *[1] * carried, 2, *[0] * WEIGHTS, *[1] * carried]
        places += [2] * (len(given) - len(places))
        weights = dims[2 + carried :][:WEIGHTS]
        folded = parts is None and all(dim is None for dim in weights)
        made = _folded(given, dims, places, clients) if folded else _stacked(given, dims, clients)
        found = _applied(_Back, name, clients if folded else parts, *made)
        if not folded:
            return _apart(found, [0] * len(found), clients)
        ours, first = found[1 : 1 + WEIGHTS], (_parted(x, 1, clients) for x in found[1 + WEIGHTS :])
        return (_parted(found[0], 2, clients), *ours, *first), (2, *[1] * (len(found) - 1))


def _product(d: Tensor, inputs: Tensor, clients: int | None) -> Tensor:
    """Σ dᵀ·inputs over steps and batch: [N, G, I], or [N, clients, G, I]."""
    if clients is None:
        return torch.bmm(d.flatten(1, 2).mT, inputs.flatten(1, 2))
    d, inputs = (_parted(x, 2, clients).movedim(2, 1).flatten(2, 3) for x in (d, inputs))
    return torch.matmul(d.mT, inputs)


def _total(d: Tensor, clients: int | None) -> Tensor:
    """Σ d over steps and batch: [N, G], or [N, clients, G]."""
    if clients is None:
        return d.sum((1, 2))
    return _parted(d, 2, clients).sum((1, 3))


def _folded(given: Sequence[Tensor], dims: Sequence[int | None], places: Sequence[int], clients: int) -> list[Tensor]:
    """The cohort as part of the batch, which stands at these places (0: a tensor without one)."""
    return [
        _led(x, dim, clients, place).flatten(place, place + 1) if place else x
        for x, dim, place in zip(given, dims, places, strict=True)
    ]


def _stacked(given: Sequence[Tensor], dims: Sequence[int | None], clients: int) -> list[Tensor]:
    """The cohort as part of the networks."""
    return [_led(x, dim, clients, 0).flatten(0, 1) for x, dim in zip(given, dims, strict=True)]


def _apart(found: Sequence[Tensor], places: Sequence[int], clients: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The cohort as a dimension of its own again, and where that is."""
    outputs = (_parted(x, place, clients) for x, place in zip(found, places, strict=True))
    return tuple(outputs), tuple(places)


def _parted(x: Tensor, place: int, clients: int) -> Tensor:
    return x.view(*x.shape[:place], clients, x.shape[place] // clients, *x.shape[place + 1 :])


def _applied(function: type[torch.autograd.Function], *given: Any) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = function.apply(*given)  # type: ignore[no-untyped-call]
    return outputs


def _led(x: Tensor, dim: int | None, size: int, place: int) -> Tensor:
    """The tensor with the cohort's dimension in its place, repeated for everyone where it has none."""
    return x.unsqueeze(place).expand(*x.shape[:place], size, *x.shape[place:]) if dim is None else x.movedim(dim, place)
