"""The steps of recurrent cells and of their gradients, for N networks at once and in as few operators as they allow.

Shapes: ``given`` [N, T, B, G·H] is what the inputs of all T steps bring to the G gates, a carried state is [N, B, H],
``weight`` [N, G·H, H] and ``bias`` [N, G·H] are the recurrent ones. A step's tensors stay in the processor's cache, so
that what can be computed inside a step is not computed for all steps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mixfed.models import steps
from mixfed.models.products import are_large

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Run:
    """What a cell did: the states [N, T, B, H], the last carried tensors, and what its gradient needs to know of it."""

    states: Tensor
    last: Tensors
    trace: Tensors


@dataclass(frozen=True)
class Gradient:
    """By what the state before brought to the gates (``fed``), by what the inputs brought to them (``given``), and by
    the first carried tensors. In their first ``alike`` numbers the former two are the same."""

    fed: Tensor
    given: Tensor
    first: Tensors
    alike: int


@dataclass(frozen=True)
class Cell:
    """``carried`` tensors go from step to step: the state, and whatever else.

    ``forward(given, carry, weight, bias)`` may write into ``given``. ``added`` is the part of the recurrent bias that
    can as well be added to the inputs' share. ``backward(d_states, d_last, carry, weight, run)`` is its gradient.
    """

    carried: int
    added: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor, Tensors, Tensor, Tensor], Run]
    backward: Callable[[Tensor, Tensors, Tensors, Tensor, Run], Gradient]


def _steps(*tensors: Tensor) -> Iterable[Tensors]:
    """The tensors step by step; their second dimension is time."""
    return zip(*(x.unbind(1) for x in tensors), strict=True)


def _back(*tensors: Tensor) -> Iterable[Tensors]:
    """The same from the last step to the first."""
    return zip(*(x.unbind(1)[::-1] for x in tensors), strict=True)


def _before(states: Tensor, first: Tensor) -> list[Tensor]:
    """The state before each step, from the last step to the first."""
    return [*states[:, :-1].unbind(1)[::-1], first]


def _fed(h: Tensor, weight: Tensor, room: Tensor) -> Tensor:
    """What the state brings to the gates, h·weightᵀ; there is room for it."""
    return steps.fed(h, weight, room, are_large(h, weight))


_MINUS_ONE = torch.tensor(-1.0)


def _tanh_(x: Tensor) -> Tensor:
    return steps.tanh_(x, _MINUS_ONE)


def _gru_forward(given: Tensor, carry: Tensors, weight: Tensor, bias: Tensor) -> Run:
    states, last, memory = steps.gru_forward(given, carry[0], weight, bias, are_large(carry[0], weight))
    return Run(states, (last,), (given, memory))


def _gru_backward(d_states: Tensor, d_last: Tensors, carry: Tensors, weight: Tensor, run: Run) -> Gradient:
    (gates, memory), large = run.trace, are_large(carry[0], weight)
    fed, given, first = steps.gru_backward(d_states, d_last[0], gates, memory, run.states, carry[0], weight, large)
    return Gradient(fed, given, (first,), 2 * carry[0].shape[-1])


def _lstm_forward(given: Tensor, carry: Tensors, weight: Tensor, bias: Tensor) -> Run:
    """i, f, o = σ(·), g = tanh(·), c ← f·c + i·g, h ← o·tanh(c)."""
    h, c = carry
    size = h.shape[-1]
    states, cells, bent = (given.new_empty(*given.shape[:-1], size) for _ in range(3))
    room = given.new_empty(*h.shape[:-1], 4 * size)
    i_f = given[..., : 2 * size]
    for all_four, both, i, f, g, o, cell, b, state in _steps(given, i_f, *given.chunk(4, -1), cells, bent, states):
        all_four.add_(_fed(h, weight, room))
        both.sigmoid_()
        _tanh_(g)
        o.sigmoid_()
        c = torch.mul(f, c, out=cell).addcmul_(i, g)
        h = torch.mul(o, _tanh_(b.copy_(c)), out=state)
    return Run(states, (h.clone(), c.clone()), (given, cells, bent))


def _lstm_backward(d_states: Tensor, d_last: Tensors, carry: Tensors, weight: Tensor, run: Run) -> Gradient:
    """With b = tanh(c) and d_c ← d_c + d·o·(1 − b²): d_o = d·b·o·(1 − o), d_i = d_c·g·i·(1 − i),
    d_f = d_c·c₋₁·f·(1 − f), d_g = d_c·i·(1 − g²) and, for the step before, d_c·f and W·(d_i, d_f, d_g, d_o)."""
    gates, cells, bent = run.trace
    fed = torch.empty_like(gates)
    d_h, d_c = (x.clone() for x in d_last)
    d, v, w = (torch.empty_like(d_h) for _ in range(3))
    back = _back(d_states, *gates.chunk(4, -1), bent, fed, *fed.chunk(4, -1))
    for (d_state, i, f, g, o, b, d_fed, d_i, d_f, d_g, d_o), c in zip(back, _before(cells, carry[1]), strict=True):
        torch.add(d_state, d_h, out=d)
        torch.mul(d, o, out=v)
        d_c.add_(v).addcmul_(v.mul_(b), b, value=-1)
        d.mul_(b).mul_(o)
        torch.addcmul(d, d, o, value=-1, out=d_o)
        torch.mul(d_c, i, out=v)
        torch.mul(v, g, out=w)
        torch.addcmul(w, w, i, value=-1, out=d_i)
        torch.addcmul(v, w, g, value=-1, out=d_g)
        d_c.mul_(f)
        torch.mul(d_c, c, out=v)
        torch.addcmul(v, v, f, value=-1, out=d_f)
        d_h = _fed(d_fed, weight.mT, d_h)
    return Gradient(fed, fed, (d_h, d_c), fed.shape[-1])


def _tanh_forward(given: Tensor, carry: Tensors, weight: Tensor, bias: Tensor) -> Run:
    last = steps.tanh_forward(given, carry[0], weight, are_large(carry[0], weight))
    return Run(given, (last,), ())


def _tanh_backward(d_states: Tensor, d_last: Tensors, carry: Tensors, weight: Tensor, run: Run) -> Gradient:
    fed, first = steps.tanh_backward(d_states, d_last[0], run.states, weight, are_large(carry[0], weight))
    return Gradient(fed, fed, (first,), fed.shape[-1])


def _relu_forward(given: Tensor, carry: Tensors, weight: Tensor, bias: Tensor) -> Run:
    """h ← max(0, x + W·h + b)."""
    h, room = carry[0], torch.empty_like(carry[0])
    for (state,) in _steps(given):
        h = torch.relu_(state.add_(_fed(h, weight, room)))
    return Run(given, (h.clone(),), ())


def _relu_backward(d_states: Tensor, d_last: Tensors, carry: Tensors, weight: Tensor, run: Run) -> Gradient:
    fed, d_h = torch.empty_like(run.states), d_last[0].clone()
    for d_state, on, d_fed in _back(d_states, run.states > 0, fed):
        torch.mul(d_h.add_(d_state), on, out=d_fed)
        d_h = _fed(d_fed, weight.mT, d_h)
    return Gradient(fed, fed, (d_h,), fed.shape[-1])


def _all(bias: Tensor) -> Tensor:
    return bias


def _all_but_new(bias: Tensor) -> Tensor:
    """The GRU's recurrent bias without that of n, which r multiplies."""
    size = bias.shape[-1] // 3
    return torch.cat([bias[..., : 2 * size], torch.zeros_like(bias[..., 2 * size :])], -1)


CELLS = {
    "GRU": Cell(1, _all_but_new, _gru_forward, _gru_backward),
    "LSTM": Cell(2, _all, _lstm_forward, _lstm_backward),
    "RNN_TANH": Cell(1, _all, _tanh_forward, _tanh_backward),
    "RNN_RELU": Cell(1, _all, _relu_forward, _relu_backward),
}
"""By the names that PyTorch has for them."""
