"""Products of large matrices by oneDNN, which PyTorch asks for other things only.

For matrices in 32 bits PyTorch calls another library (MKL), which on some processors uses half of what they can do:
there oneDNN is twice as fast from some ten million operations on. On others both are equal. What is small, in another
precision or on another device is left to PyTorch.

:func:`linear` is ``F.linear`` with such products, alone, differentiated and under vmap, where each client has its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from mixfed.models import grouped, vmap
from mixfed.models.unlocked import without_lock

LARGE = 8_000_000
"""FLOPs of a product from which on oneDNN makes up for what it takes to begin."""

ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
"""Whether there are such products; without them all is left to PyTorch."""


class Linear(nn.Linear):
    """``nn.Linear`` with these products."""

    def forward(self, input: Tensor) -> Tensor:
        """See :func:`linear`."""
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input·weightᵀ + bias."""
    if has_torch_function_variadic(input, weight):
        found: Tensor = handle_torch_function(linear, (input, weight), input, weight, bias)
        return found
    if weight.ndim != 2 or not _suits(input, weight):
        return F.linear(input, weight, bias)
    if input.ndim == 3 and input.stride(0) < input.stride(1):  # rows are taken in the order in which they are in memory
        return linear(input.transpose(0, 1), weight, bias).transpose(0, 1)
    rows = input if input.ndim == 2 else input.reshape(-1, input.shape[-1])
    answer = _applied(rows, weight, bias)
    return answer if input.ndim == 2 else answer.view(*input.shape[:-1], -1)


def linears(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same of many clients: input [clients, n, in], weight [clients, out, in] and bias [clients, out].

    A single output is a product of vectors, at which ``bmm`` is slow.
    """
    if weight.shape[1] == 1:
        answer = (input * weight).sum(-1, keepdim=True)
        return answer if bias is None else answer + bias.unsqueeze(1)
    if are_large(input, weight):
        return _applied(input, weight, bias)
    return torch.bmm(input, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), input, weight.mT)


def by_rows(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with rows first: input [n, clients, in], answers [n, clients, out]."""
    if grouped.pays(len(input), weight):
        packed = grouped.pack(weight, len(input))
        return grouped.product(input.contiguous(), packed, None if bias is None else bias.reshape(-1))
    return linears(input.transpose(0, 1), weight, bias).transpose(0, 1).contiguous()


def are_large(input: Tensor, weight: Tensor) -> bool:
    """Whether these products of many clients are oneDNN's."""
    return _suits(input[0], weight[0])


def _suits(input: Tensor, weight: Tensor) -> bool:
    """Whether a product is large enough, and of the kind that oneDNN has."""
    return (
        2 * input.numel() * weight.shape[0] >= LARGE
        and ONEDNN
        and input.dtype == weight.dtype == torch.float32
        and input.device.type == weight.device.type == "cpu"
    )


def _applied(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if vmap.is_active():
        found: Tensor = vmap.applied(_UnderVmap, input, weight, bias)
        return found
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (input, weight, bias)):
        found = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
        return found
    return _computed(input, weight, bias)


class _Linear(torch.autograd.Function):
    """input·weightᵀ + bias of matrices, or of as many of each."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _computed(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (input, weight), (of_input, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            _applied(gradient, weight.mT, None) if of_input else None,
            _applied(gradient.mT, input.mT, None) if of_weight else None,
            gradient.sum(-2) if of_bias else None,
        )


class _UnderVmap(_Linear):
    """The same as vmap wants it, which costs some bookkeeping at every call."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        return _computed(input, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        clients, alike = info.batch_size, in_dims[1] is None and in_dims[2] is None and weight.ndim == 2
        x = _led(input, in_dims[0], clients)
        if alike:  # the weight is everyone's, and the clients are one large batch
            return _applied(x.flatten(0, 1), weight, bias).view(clients, x.shape[1], -1), 0
        w, b = _led(weight, in_dims[1], clients), None if bias is None else _led(bias, in_dims[2], clients)
        if w.ndim == 3:
            return _applied(x, w, b), 0
        together = (None if one is None else one.flatten(0, 1) for one in (x, w, b))  # clients of clients
        answer = _applied(*together)  # type: ignore[arg-type]
        return answer.view(clients, -1, *answer.shape[1:]), 0


def _led(x: Tensor, dim: int | None, clients: int) -> Tensor:
    """The tensor with the clients' dimension in front, repeated for everyone where it has none."""
    return x.expand(clients, *x.shape) if dim is None else x.movedim(dim, 0)


def _computed(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if input.ndim == 2:
        return _by_onednn(input, weight, bias)
    if len(input) == 1:
        return _by_onednn(input[0], weight[0], None if bias is None else bias[0])[None]
    by_row = input.transpose(0, 1)
    if by_row.is_contiguous() and grouped.pays(len(by_row), weight):
        return by_rows(by_row, weight, bias).transpose(0, 1)
    return _one_by_one(input, weight, bias)


@without_lock
def _one_by_one(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    answer = torch.empty([input.shape[0], input.shape[1], weight.shape[1]], dtype=input.dtype)
    for i in range(input.shape[0]):
        answer[i].copy_(_by_onednn(input[i], weight[i], None if bias is None else bias[i]))
    return answer


def _by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product, or the other way round and turned, so that no large matrix has to be copied into rows first."""
    input, weight = _dense(input), _dense(weight)  # by other strides oneDNN takes ages
    if bias is None and not input.is_contiguous() and input.t().is_contiguous() and weight.numel() < input.numel():
        return _product(weight, input, None).t()
    return _product(input, weight, None if bias is None else bias.contiguous())


def _dense(x: Tensor) -> Tensor:
    """The matrix as one piece of memory, by rows or by columns."""
    by_columns = x.stride(0) == 1 and x.shape[1] > 1
    return (x if x.t().is_contiguous() else x.t().contiguous().t()) if by_columns else x.contiguous()


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return found
