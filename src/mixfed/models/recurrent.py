"""A GRU for a whole cohort: PyTorch's own cannot run under vmap, and pays for every client's every step anew.

A sequence is many small steps, so that the work is bound by the number of operators. Here a step is seven of them for
all clients of a chunk together, and so is its backward pass, which is written by hand: with the gates r, z, n and
m = W_n·h + b_n of every step at hand, all that does not hang on the step before is computed for all steps at once.

    r, z = σ(x_rz + W_rz·h + b_rz)      n = tanh(x_n + r·m)      h ← n + z·(h − n)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GRU(nn.GRU):
    """``nn.GRU`` with the same parameters and answers, for padded batches without dropout between its layers."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if not isinstance(input, Tensor) or input.ndim != 3 or (self.dropout and self.num_layers > 1):
            found: tuple[Tensor, Tensor] = super().forward(input, hx)
            return found
        x = input.transpose(0, 1) if self.batch_first else input
        directions = 1 + self.bidirectional
        if hx is None:
            hx = x.new_zeros(self.num_layers * directions, x.shape[1], self.hidden_size)
        last = []
        for layer in range(self.num_layers):
            outputs = []
            for reverse in range(directions):
                h = hx[layer * directions + reverse]
                states = self._scan(x.flip(0) if reverse else x, h, f"_l{layer}" + "_reverse" * reverse)
                last.append(states[-1])
                outputs.append(states.flip(0) if reverse else states)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
        return (x.transpose(0, 1) if self.batch_first else x), torch.stack(last)

    def _scan(self, x: Tensor, h: Tensor, name: str) -> Tensor:
        own = self._parameters
        given = F.linear(x, own[f"weight_ih{name}"], own.get(f"bias_ih{name}"))  # type: ignore[arg-type]
        weight, bias = own[f"weight_hh{name}"], own.get(f"bias_hh{name}")
        assert weight is not None
        return _applied(_Scan, given, h, weight, weight.new_zeros(len(weight)) if bias is None else bias)[0]


def for_cohorts(module: nn.Module) -> nn.Module:
    """The module with its recurrent layers in the form above; parameters and their names stay."""
    for part in module.modules():
        if type(part) is nn.GRU:
            part.__class__ = GRU
    return module


class _Scan(torch.autograd.Function):
    """given [T, …, B, 3H], h […, B, H], weight […, 3H, H], bias […, 3H] → states [T, …, B, H], gates [T, …, B, 4H].

    The dots are a cohort, or nothing; a weight and a bias without it are everyone's.
    """

    @staticmethod
    def forward(given: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        size = h.shape[-1]
        states, gates = given.new_empty(*given.shape[:-1], size), given.new_empty(*given.shape[:-1], 4 * size)
        x_rz, x_n = given[..., : 2 * size] + bias[..., None, : 2 * size], given[..., 2 * size :]
        transposed, bias_n = weight.mT, bias[..., None, 2 * size :]
        rz, (r, z, n, m) = gates[..., : 2 * size], gates.chunk(4, -1)
        for t in range(len(given)):
            fed = torch.matmul(h, transposed)
            torch.add(x_rz[t], fed[..., : 2 * size], out=rz[t]).sigmoid_()
            torch.add(fed[..., 2 * size :], bias_n, out=m[t])
            torch.addcmul(x_n[t], r[t], m[t], out=n[t]).tanh_()
            h = torch.lerp(n[t], h, z[t], out=states[t])
        return states, gates

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        _, h, weight, _ = inputs
        ctx.save_for_backward(h, weight, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, d_states: Tensor, _: Any) -> tuple[Tensor, ...]:
        return _applied(_Back, d_states, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], given: Tensor, h: Tensor, weight: Tensor, bias: Tensor) -> Any:
        size = info.batch_size
        given, h = _led(given, in_dims[0], size, 1), _led(h, in_dims[1], size, 0)
        weight = weight if in_dims[2] is None else weight.movedim(in_dims[2], 0)
        bias = bias if in_dims[3] is None else bias.movedim(in_dims[3], 0)
        return _applied(_Scan, given, h, weight, bias), (1, 1)


class _Back(torch.autograd.Function):
    """The gradients of given, h, weight and bias from that of the states."""

    @staticmethod
    def forward(d_states: Tensor, h: Tensor, weight: Tensor, states: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
        size = h.shape[-1]
        r, z, n, m = gates.chunk(4, -1)
        before = torch.cat([h[None], states[:-1]])
        by_n = (1 - z) * (1 - n * n)
        by_z = (before - n) * z * (1 - z)
        by_r = m * r * (1 - r)
        d_fed, d_n = torch.empty_like(gates[..., : 3 * size]), torch.empty_like(states)
        d_r, d_z, d_m = d_fed.chunk(3, -1)
        d_h = torch.zeros_like(h)
        for t in reversed(range(len(states))):
            d = d_states[t] + d_h
            torch.mul(d, by_n[t], out=d_n[t])
            torch.mul(d, by_z[t], out=d_z[t])
            torch.mul(d_n[t], by_r[t], out=d_r[t])
            torch.mul(d_n[t], r[t], out=d_m[t])
            d_h = torch.matmul(d_fed[t], weight).addcmul_(d, z[t])
        along = d_fed.movedim(0, -3).flatten(-3, -2)  # […, T·B, 3H]
        d_weight = torch.matmul(along.mT, before.movedim(0, -3).flatten(-3, -2))
        d_bias = along.sum(-2)
        if weight.ndim == 2:  # everyone's
            d_weight, d_bias = d_weight.sum_to_size(weight.shape), d_bias.sum_to_size(weight.shape[:1])
        return torch.cat([d_fed[..., : 2 * size], d_n], -1), d_h, d_weight, d_bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("The gradient of this GRU cannot itself be differentiated.")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], d_states: Tensor, h: Tensor, weight: Tensor, states: Tensor, gates: Tensor
    ) -> Any:
        size = info.batch_size
        d_states, states, gates = (
            _led(x, dim, size, 1) for x, dim in zip((d_states, states, gates), (in_dims[0], *in_dims[3:]), strict=True)
        )
        h, weight = _led(h, in_dims[1], size, 0), _led(weight, in_dims[2], size, 0)
        return _applied(_Back, d_states, h, weight, states, gates), (1, 0, 0, 0)


def _applied(function: type[torch.autograd.Function], *tensors: Tensor) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = function.apply(*tensors)  # type: ignore[no-untyped-call]
    return outputs


def _led(x: Tensor, dim: int | None, size: int, place: int) -> Tensor:
    """The tensor with the cohort's dimension in its place, repeated for everyone where it has none."""
    return x.unsqueeze(place).expand(*x.shape[:place], size, *x.shape[place:]) if dim is None else x.movedim(dim, place)
