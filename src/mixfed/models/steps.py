"""The time steps of recurrent cells in loops that hold no lock of Python, so that several threads run them at once.

A step is a handful of small operators, and each of them takes the interpreter's lock: threads that train different
clients would wait for each other more than they work. TorchScript runs a whole loop without it. PyTorch wants it to be
replaced by its compiler, which takes half a minute for such a loop; where a version of PyTorch lacks it, the same
functions run as Python, and a warning says so.

``large`` says that the products of single networks are oneDNN's (:mod:`mixfed.models.products`).
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_scripting = threading.Lock()
_log = logging.getLogger("mixfed")


def without_lock(function: Callable[P, R]) -> Callable[P, R]:
    """The function in TorchScript, from its first call on."""
    made: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _scripting:
            if not made:
                made.append(_scripted(function))
        return made[0](*args, **kwargs)

    return call


def _scripted(function: Callable[P, R]) -> Callable[P, R]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # see above
        try:
            return torch.jit.script(function)
        except (AttributeError, RuntimeError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            _log.warning("Recurrent steps run as Python, one thread at a time: no TorchScript here (%s).", why)
            return function


def fed(h: Tensor, weight: Tensor, room: Tensor, large: bool) -> Tensor:
    """What the state brings to the gates, h·weightᵀ, written into the room there is for it."""
    if not large:
        return torch.bmm(h, weight.transpose(1, 2), out=room)
    for i in range(h.shape[0]):
        room[i].copy_(torch.ops.mkldnn._linear_pointwise(h[i], weight[i], None, "none", [], ""))
    return room


def tanh_(x: Tensor, minus_one: Tensor) -> Tensor:
    """tanh(x) = 2·σ(2x) − 1 in x: PyTorch's own takes ten times as long as its σ."""
    return torch.add(minus_one, x.mul_(2).sigmoid_(), alpha=2, out=x)


@without_lock
def gru_forward(given: Tensor, h: Tensor, weight: Tensor, bias: Tensor, large: bool) -> tuple[Tensor, Tensor, Tensor]:
    """r, z = σ(x_rz + W_rz·h + b_rz), m = W_n·h + b_n, n = tanh(x_n + r·m), h ← n + z·(h − n): states, last, all m."""
    size, minus_one = h.shape[-1], torch.tensor(-1.0)
    states, memory = torch.empty_like(given[..., :size]), torch.empty_like(given[..., :size])
    room, bias_n = torch.empty_like(given[:, 0]), bias[:, 2 * size :].unsqueeze(1)
    for t in range(given.shape[1]):
        r, z, n = given[:, t].chunk(3, -1)
        fed(h, weight, room, large)
        given[:, t, :, : 2 * size].add_(room[..., : 2 * size]).sigmoid_()
        m = torch.add(room[..., 2 * size :], bias_n, out=memory[:, t])
        tanh_(n.addcmul_(r, m), minus_one)
        h = torch.lerp(n, h, z, out=states[:, t])
    return states, h.clone(), memory


@without_lock
def gru_backward(
    d_states: Tensor, d_last: Tensor, gates: Tensor, memory: Tensor, states: Tensor, first: Tensor, weight: Tensor,
    large: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """With u = d·(1 − z): d_n = u·(1 − n²), d_z = u·z·(h − n), d_m = d_n·r, d_r = d_m·m·(1 − r) and, for the step
    before, d·z + W·(d_r, d_z, d_m). By r, z, m; by r, z, n; and by the first state."""
    size = d_last.shape[-1]
    by_fed, by_given, d_h = torch.empty_like(gates), torch.empty_like(gates), d_last.clone()
    d, u, v, room = torch.empty_like(d_h), torch.empty_like(d_h), torch.empty_like(d_h), torch.empty_like(d_h)
    for k in range(gates.shape[1]):
        t = gates.shape[1] - 1 - k
        r, z, n = gates[:, t].chunk(3, -1)
        d_r, d_z, d_n = by_given[:, t].chunk(3, -1)
        d_fed = by_fed[:, t]
        d_m, h = d_fed[..., 2 * size :], states[:, t - 1] if t else first
        torch.add(d_states[:, t], d_h, out=d)
        torch.mul(d, z, out=d_h)
        torch.sub(d, d_h, out=u)
        torch.mul(torch.sub(h, n, out=v).mul_(z), u, out=d_z)
        torch.addcmul(u, torch.mul(u, n, out=v), n, value=-1, out=d_n)
        torch.mul(d_n, r, out=d_m)
        torch.mul(d_m, memory[:, t], out=v)
        torch.addcmul(v, v, r, value=-1, out=d_r)
        d_fed[..., : 2 * size].copy_(by_given[:, t, :, : 2 * size])
        if large:
            d_h.add_(fed(d_fed, weight.transpose(1, 2), room, large))
        else:
            d_h.baddbmm_(d_fed, weight)
    return by_fed, by_given, d_h


@without_lock
def tanh_forward(given: Tensor, h: Tensor, weight: Tensor, large: bool) -> Tensor:
    """h ← tanh(x + W·h + b), in the place of the inputs' share; the last one."""
    room, minus_one = torch.empty_like(h), torch.tensor(-1.0)
    for t in range(given.shape[1]):
        h = tanh_(given[:, t].add_(fed(h, weight, room, large)), minus_one)
    return h.clone()


@without_lock
def tanh_backward(
    d_states: Tensor, d_last: Tensor, states: Tensor, weight: Tensor, large: bool
) -> tuple[Tensor, Tensor]:
    """d·(1 − h²) at every step, and by the first state."""
    found, d_h = torch.empty_like(states), d_last.clone()
    v, transposed = torch.empty_like(d_h), weight.transpose(1, 2)
    for k in range(states.shape[1]):
        t = states.shape[1] - 1 - k
        d_h.add_(d_states[:, t])
        d_fed = torch.addcmul(d_h, torch.mul(d_h, states[:, t], out=v), states[:, t], value=-1, out=found[:, t])
        fed(d_fed, transposed, d_h, large)
    return found, d_h
