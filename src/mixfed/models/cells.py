"""Recurrent cells over a whole sequence, and their gradients, for N networks at once.

Shapes: ``given`` [T, B, N, G·H] is what the inputs of all T steps bring to the G gates, a carried tensor is [B, N, H],
``weight`` [N, G·H, H] and ``bias`` [N, G·H] are the recurrent ones. Time comes first and networks come late, so that
what a step reads and writes is one piece of memory (:mod:`mixfed.models.steps`), and its products are one operator
(:mod:`mixfed.models.grouped`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mixfed.models import steps

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Run:
    """What a cell did: the states after every step, the last carried tensors, and what its gradient needs to know."""

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
    can as well be added to the inputs' share. The first tensor of a trace holds the states before every step.
    ``backward(d, d_last, weight, trace)`` is the gradient; it may write into ``d``, the one by the states after every
    step, in which that by the last state is already.
    """

    carried: int
    added: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor, Tensors, Tensor, Tensor], Run]
    backward: Callable[[Tensor, Tensors, Tensor, Tensors], Gradient]


def _gru_forward(given: Tensor, carry: Tensors, weight: Tensor, bias: Tensor) -> Run:
    ready, grouped = steps.ready(weight, given.shape[1])
    only_new = (bias - _all_but_new(bias)).reshape(-1)
    states, memory = steps.gru_forward(given, carry[0], ready, only_new, grouped)
    return Run(states[1:], (states[-1],), (states, given, memory))


def _gru_backward(d: Tensor, d_last: Tensors, weight: Tensor, trace: Tensors) -> Gradient:
    states, gates, memory = trace
    fed, given, first = steps.gru_backward(d, gates, memory, states, *steps.ready(weight.mT, d.shape[1]))
    return Gradient(fed, given, (first,), 2 * d.shape[-1])


def _lstm_forward(given: Tensor, carry: Tensors, weight: Tensor, bias: Tensor) -> Run:
    h, c = carry
    states, cells, bent = steps.lstm_forward(given, h, c, *steps.ready(weight, given.shape[1]))
    return Run(states[1:], (states[-1], cells[-1]), (states, given, cells, bent))


def _lstm_backward(d: Tensor, d_last: Tensors, weight: Tensor, trace: Tensors) -> Gradient:
    _, gates, cells, bent = trace
    d_c = d_last[1].clone()
    fed, first = steps.lstm_backward(d, d_c, gates, cells, bent, *steps.ready(weight.mT, d.shape[1]))
    return Gradient(fed, fed, (first, d_c), fed.shape[-1])


def _rnn_forward(given: Tensor, carry: Tensors, weight: Tensor, bias: Tensor, *, relu: bool) -> Run:
    states = steps.rnn_forward(given, carry[0], *steps.ready(weight, given.shape[1]), relu)
    return Run(states[1:], (states[-1],), (states,))


def _rnn_backward(d: Tensor, d_last: Tensors, weight: Tensor, trace: Tensors, *, relu: bool) -> Gradient:
    first = steps.rnn_backward(d, trace[0], *steps.ready(weight.mT, d.shape[1]), relu)
    return Gradient(d, d, (first,), d.shape[-1])


def _all(bias: Tensor) -> Tensor:
    return bias


def _all_but_new(bias: Tensor) -> Tensor:
    """The GRU's recurrent bias without that of n, which r multiplies."""
    size = bias.shape[-1] // 3
    return torch.cat([bias[..., : 2 * size], torch.zeros_like(bias[..., 2 * size :])], -1)


CELLS = {
    "GRU": Cell(1, _all_but_new, _gru_forward, _gru_backward),
    "LSTM": Cell(2, _all, _lstm_forward, _lstm_backward),
    "RNN_TANH": Cell(1, _all, partial(_rnn_forward, relu=False), partial(_rnn_backward, relu=False)),
    "RNN_RELU": Cell(1, _all, partial(_rnn_forward, relu=True), partial(_rnn_backward, relu=True)),
}
"""By the names that PyTorch has for them."""
