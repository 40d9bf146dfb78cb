"""The time steps of recurrent cells, each a handful of small operators, in loops that hold no lock of Python.

Shapes: ``given`` [T, B, N, G·H] is what the inputs of all T steps bring to the G gates of N networks; the states are
[T + 1, B, N, H], and the first of them is the one to begin with. A loop forward turns ``given`` into the gates. One
backward changes ``d``, the gradient by the states after every step [T, B, N, H].

``weight`` is what :func:`ready` made of the recurrent weights, and ``grouped`` says how.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixfed.models.grouped import add_product_, pack, pays, product
from mixfed.models.unlocked import without_lock


def ready(weight: Tensor, rows: int) -> tuple[Tensor, bool]:
    """Weights [N, out, in] for :func:`fed` with so many rows, and whether they are for grouped products."""
    return (pack(weight, rows), True) if pays(rows, weight) else (weight.transpose(1, 2), False)


def fed(h: Tensor, weight: Tensor, bias: Tensor | None, grouped: bool) -> Tensor:
    """What a state [B, N, in] brings to the gates, h·weightᵀ + bias."""
    if grouped:
        return product(h, weight, bias)
    found = torch.bmm(h.transpose(0, 1), weight).transpose(0, 1)
    return found if bias is None else found + bias.view(1, h.shape[1], -1)


def feed_(to: Tensor, h: Tensor, weight: Tensor, grouped: bool) -> Tensor:
    """Adds what a state brings to the gates."""
    return add_product_(to, h, weight) if grouped else to.add_(torch.bmm(h.transpose(0, 1), weight).transpose(0, 1))


def tanh_of(x: Tensor, minus_one: Tensor, out: Tensor) -> Tensor:
    """tanh(x) = 2·σ(2x) − 1, which changes x: PyTorch's own takes ten times as long as its σ."""
    return torch.add(minus_one, x.mul_(2).sigmoid_(), alpha=2, out=out)


def begun(first: Tensor, steps: int) -> Tensor:
    """Room for what is carried from step to step, with what there is at first."""
    room = first.new_empty((steps + 1, first.shape[0], first.shape[1], first.shape[2]))
    room[0].copy_(first)
    return room


@without_lock
def gru_forward(given: Tensor, first: Tensor, weight: Tensor, bias: Tensor, grouped: bool) -> tuple[Tensor, Tensor]:
    """r, z = σ(x_rz + W_rz·h), m = W_n·h + b_n, n = tanh(x_n + r·m), h ← n + z·(h − n): states and all m.

    Of the bias only b_n is not zero, because the others are in what is given."""
    size, minus_one = first.shape[-1], torch.tensor(-1.0, dtype=first.dtype)
    states = begun(first, given.shape[0])
    memory = torch.empty_like(states[1:])
    for t in range(given.shape[0]):
        r, z, n = given[t].chunk(3, -1)
        brought = fed(states[t], weight, bias, grouped)
        given[t, :, :, : 2 * size].add_(brought[..., : 2 * size]).sigmoid_()
        m = memory[t].copy_(brought[..., 2 * size :])
        tanh_of(n.addcmul_(r, m), minus_one, n)
        torch.lerp(n, states[t], z, out=states[t + 1])
    return states, memory


@without_lock
def gru_backward(
    d: Tensor, gates: Tensor, memory: Tensor, states: Tensor, weight: Tensor, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """With u = d·(1 − z): d_n = u·(1 − n²), d_z = d·(h − n)·z·(1 − z), d_m = d_n·r, d_r = d_n·m·r·(1 − r) and, for the
    step before, d·z + W·(d_r, d_z, d_m). By r, z, m; by r, z, n; and by the first state."""
    size = states.shape[-1]
    by_fed, by_given, first = torch.empty_like(gates), torch.empty_like(gates), torch.zeros_like(states[0])
    v = torch.empty_like(first)
    for k in range(gates.shape[0]):
        t = gates.shape[0] - 1 - k
        r, z, n = gates[t].chunk(3, -1)
        d_r, d_z, d_n = by_given[t].chunk(3, -1)
        d_m, before = by_fed[t, :, :, 2 * size :], d[t - 1] if t else first
        before.addcmul_(d[t], z)
        torch.sub(states[t], n, out=v).mul_(d[t])
        torch.ops.aten.sigmoid_backward(v, z, grad_input=d_z)
        torch.addcmul(d[t], d[t], z, value=-1, out=v)
        torch.ops.aten.tanh_backward(v, n, grad_input=d_n)
        torch.mul(d_n, r, out=d_m)
        torch.mul(d_n, memory[t], out=v)
        torch.ops.aten.sigmoid_backward(v, r, grad_input=d_r)
        by_fed[t, :, :, : 2 * size].copy_(by_given[t, :, :, : 2 * size])
        feed_(before, by_fed[t], weight, grouped)
    return by_fed, by_given, first


@without_lock
def lstm_forward(
    given: Tensor, first: Tensor, first_cell: Tensor, weight: Tensor, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """i, f, o = σ(·), g = tanh(·), c ← f·c + i·g, h ← o·tanh(c): all h, c and, after every step, tanh(c)."""
    size, minus_one = first.shape[-1], torch.tensor(-1.0, dtype=first.dtype)
    states, cells = begun(first, given.shape[0]), begun(first_cell, given.shape[0])
    bent = torch.empty_like(states[1:])
    for t in range(given.shape[0]):
        feed_(given[t], states[t], weight, grouped)
        given[t, :, :, : 2 * size].sigmoid_()
        i, f, g, o = given[t].chunk(4, -1)
        tanh_of(g, minus_one, g)
        c = torch.mul(f, cells[t], out=cells[t + 1]).addcmul_(i, g)
        b = tanh_of(bent[t].copy_(c), minus_one, bent[t])
        torch.mul(o.sigmoid_(), b, out=states[t + 1])
    return states, cells, bent


@without_lock
def lstm_backward(
    d: Tensor, d_c: Tensor, gates: Tensor, cells: Tensor, bent: Tensor, weight: Tensor, grouped: bool
) -> tuple[Tensor, Tensor]:
    """With b = tanh(c) and d_c ← d_c + d·o·(1 − b²): d_o = d·b·o·(1 − o), d_i = d_c·g·i·(1 − i),
    d_f = d_c·c₋₁·f·(1 − f), d_g = d_c·i·(1 − g²) and, for the step before, W·(d_i, d_f, d_g, d_o) and d_c·f, which ends
    in d_c. By the gates, and by the first state."""
    found, first = torch.empty_like(gates), torch.zeros_like(cells[0])
    v = torch.empty_like(first)
    for k in range(gates.shape[0]):
        t = gates.shape[0] - 1 - k
        i, f, g, o = gates[t].chunk(4, -1)
        d_i, d_f, d_g, d_o = found[t].chunk(4, -1)
        torch.mul(d[t], o, out=v)
        d_c.add_(torch.ops.aten.tanh_backward(v, bent[t], grad_input=v))
        torch.ops.aten.sigmoid_backward(d[t].mul_(bent[t]), o, grad_input=d_o)
        torch.ops.aten.sigmoid_backward(torch.mul(d_c, g, out=v), i, grad_input=d_i)
        torch.ops.aten.tanh_backward(torch.mul(d_c, i, out=v), g, grad_input=d_g)
        torch.ops.aten.sigmoid_backward(torch.mul(d_c, cells[t], out=v), f, grad_input=d_f)
        d_c.mul_(f)
        feed_(d[t - 1] if t else first, found[t], weight, grouped)
    return found, first


@without_lock
def rnn_forward(given: Tensor, first: Tensor, weight: Tensor, grouped: bool, relu: bool) -> Tensor:
    """h ← tanh(x + W·h), or max(0, ·): the states."""
    states, minus_one = begun(first, given.shape[0]), torch.tensor(-1.0, dtype=first.dtype)
    for t in range(given.shape[0]):
        x = feed_(given[t], states[t], weight, grouped)
        if relu:
            torch.clamp(x, min=0, out=states[t + 1])
        else:
            tanh_of(x, minus_one, states[t + 1])
    return states


@without_lock
def rnn_backward(d: Tensor, states: Tensor, weight: Tensor, grouped: bool, relu: bool) -> Tensor:
    """Turns d into the gradient by the gates, d·(1 − h²) or d where h > 0; by the first state."""
    first = torch.zeros_like(states[0])
    for k in range(d.shape[0]):
        t = d.shape[0] - 1 - k
        if relu:
            torch.ops.aten.threshold_backward(d[t], states[t + 1], 0, grad_input=d[t])
        else:
            torch.ops.aten.tanh_backward(d[t], states[t + 1], grad_input=d[t])
        feed_(d[t - 1] if t else first, d[t], weight, grouped)
    return first
