"""A recurrent layer as one function with a gradient of its own, alone and under vmap.

A sequence is many small steps, so that PyTorch's bookkeeping for each operator of each step takes longer than its
numbers do. A layer (:mod:`mixfed.models.layers`) does the work of N networks at once. Without vmap these are its
directions. Under vmap a cohort multiplies N where clients have weights of their own. Where the weights are everyone's,
the cohort is one large batch, and only the gradients of weights are taken client by client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mixfed.models import vmap
from mixfed.models.cells import Run
from mixfed.models.layers import LAYERS, layer_for, parted

WEIGHTS = 4
"""The weights of inputs and of states, and their biases."""


def scan(cell: str, x: Tensor, weights: Sequence[Tensor], carry: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The states after every step, and the last carried tensors."""
    states, *others = _scanned(layer_for(cell, x), x, *weights, *carry)
    return states, others[: len(carry)]


class _Scan(torch.autograd.Function):
    """Of x, weights and carried tensors: the states, the last carried tensors, and a trace for the gradient."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        output = _run(*given)
        _remember(ctx, given, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved, carried = ctx.saved_tensors, LAYERS[ctx.name].carried
        outputs = (saved[1 + WEIGHTS + carried], *saved[1 + WEIGHTS :][:carried])  # the states, and what was carried
        given = (torch.zeros_like(x) if d is None else d for d, x in zip(gradients, outputs, strict=False))
        return None, *_gradients(ctx.name, 0, *given, *saved)


class _ScanUnderVmap(_Scan):
    """The same as vmap wants it."""

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        return _run(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _remember(ctx, inputs, output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], name: str, *given: Tensor) -> Any:
        layer, clients, dims = LAYERS[name], info.batch_size, in_dims[1:]
        if not _shared(name, dims[1:]):
            found = _scanned(name, *_stacked(given, dims, clients))
            return _apart(found, _first(name, len(found), 1 + layer.carried), clients)
        found = _scanned(name, *_folded(given, dims, [2, *[0] * WEIGHTS, *[1] * layer.carried], clients))
        return _apart(found, [2, *[1] * layer.carried, *[2] * (len(found) - 1 - layer.carried)], clients)


class _Back(torch.autograd.Function):
    """The gradients of a scan's x, weights and carried tensors; by ``clients``, of whom its batch is made, or 0."""

    @staticmethod
    def forward(name: str, clients: int, *given: Tensor) -> tuple[Tensor, ...]:
        layer = LAYERS[name]
        tensors = iter(given)
        d_states, d_last = next(tensors), _next(tensors, layer.carried)
        x, weights, carry = next(tensors), _next(tensors, WEIGHTS), _next(tensors, layer.carried)
        run = Run(next(tensors), _next(tensors, layer.carried), tuple(tensors))
        return layer.backward(d_states, d_last, x, weights, carry, run, clients)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("The gradient of a recurrent layer cannot itself be differentiated.")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], name: str, parts: int, *given: Tensor) -> Any:
        carried, clients, dims = LAYERS[name].carried, info.batch_size, in_dims[2:]
        if parts or not _shared(name, dims[2 + carried :]):
            whole = _first(name, len(given), 3 + WEIGHTS + 3 * carried)
            found = _gradients(name, parts, *_stacked(given, dims, clients, whole))
            return _apart(found, [0] * len(found), clients)
        places = [2, *[1] * carried, 2, *[0] * WEIGHTS, *[1] * carried, 2, *[1] * carried]
        places += [2] * (len(given) - len(places))
        d_x, *others = _gradients(name, clients, *_folded(given, dims, places, clients))
        first = (parted(x, 1, clients) for x in others[WEIGHTS:])
        return (parted(d_x, 2, clients), *others[:WEIGHTS], *first), (2, *[1] * len(others))


def _shared(name: str, dims: Sequence[int | None]) -> bool:
    """Whether the cohort can be one batch: the weights, which come first, are everyone's."""
    return LAYERS[name].folds and all(dim is None for dim in dims[:WEIGHTS])


def _folded(given: Sequence[Tensor], dims: Sequence[int | None], places: Sequence[int], clients: int) -> list[Tensor]:
    """The cohort as part of the batch, which stands at these places (0: a tensor without one)."""
    return [
        _led(x, dim, clients, place).flatten(place, place + 1) if place else x
        for x, dim, place in zip(given, dims, places, strict=True)
    ]


def _stacked(
    given: Sequence[Tensor], dims: Sequence[int | None], clients: int, places: Sequence[int | None] | None = None
) -> list[Tensor]:
    """The cohort as part of the networks, but for tensors that have no place for either."""
    return [
        x if place is None else _led(x, dim, clients, 0).flatten(0, 1)
        for x, dim, place in zip(given, dims, places or [0] * len(given), strict=True)
    ]


def _first(name: str, count: int, before: int) -> list[int | None]:
    """Where each of so many tensors has its networks: in front. Those after the first few are a trace, and where that
    is of single networks, they have no such place."""
    return [0 if i < before or LAYERS[name].folds else None for i in range(count)]


def _apart(found: Sequence[Tensor], places: Sequence[int | None], clients: int) -> tuple[Any, Any]:
    """The cohort as a dimension of its own again, at these places."""
    outputs = (x if place is None else parted(x, place, clients) for x, place in zip(found, places, strict=True))
    return tuple(outputs), tuple(places)


def _next(tensors: Iterator[Tensor], count: int) -> tuple[Tensor, ...]:
    return tuple(islice(tensors, count))


def _scanned(*given: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = vmap.applied(_ScanUnderVmap if vmap.is_active() else _Scan, *given)
    return found


def _gradients(*given: Any) -> tuple[Tensor, ...]:
    """What :class:`_Back` gives, which is a function of its own only for vmap, and to refuse a second gradient."""
    if not torch.is_grad_enabled() and not vmap.is_active():
        return _Back.forward(*given)
    found: tuple[Tensor, ...] = vmap.applied(_Back, *given)
    return found


def _run(name: str, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    run = LAYERS[name].forward(x, given[:WEIGHTS], given[WEIGHTS:])
    return run.states, *run.last, *run.trace


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.name, *tensors = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1 + LAYERS[ctx.name].carried :])
    ctx.set_materialize_grads(False)  # the trace's would be large


def _led(x: Tensor, dim: int | None, size: int, place: int) -> Tensor:
    """The tensor with the cohort's dimension in its place, repeated for everyone where it has none."""
    return x.unsqueeze(place).expand(*x.shape[:place], size, *x.shape[place:]) if dim is None else x.movedim(dim, place)
