"""Attention under vmap: PyTorch's fused operator has no rule for it, and would run the clients one by one.

softmax(q·kᵀ)·v has no weights, so that the clients of a chunk are only a larger batch: [clients, batch, …] is folded
into [clients·batch, …] and back, for the operator and for its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mixfed.models import vmap

_OPERATORS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_registered: list[Any] = []


def attend_under_vmap() -> None:
    """Tells PyTorch the rule, for this process, unless it has one; for attention that is called in any way."""
    if _registered or vmap.MISSING:
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _registered.append(library)
    for operator in _OPERATORS:
        name = operator._schema.name
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "FuncTorchBatched"):
            library.impl(name.removeprefix("aten::"), _rule(operator), "FuncTorchBatched")


def _rule(operator: Any) -> Any:
    def batched(*args: Any, attn_mask: Tensor | None = None, **options: Any) -> Any:
        count = sum(isinstance(x, Tensor) for x in args)

        def on_chunk(given: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
            tensors, masks = given
            clients, batch = tensors[0].shape[:2]
            mask = _for_all(masks[0], batch) if masks else None
            found = operator(*(x.flatten(0, 1) for x in tensors), *args[count:], attn_mask=mask, **options)
            return tuple(x.view(clients, batch, *x.shape[1:]) for x in found)

        return vmap.beneath(on_chunk, (args[:count], () if attn_mask is None else (attn_mask,)))

    return batched


def _for_all(mask: Tensor, batch: int) -> Tensor:
    """A mask [clients, …, L, S] of up to four dimensions more as one of [clients·batch, heads, L, S]."""
    while mask.ndim < 5:
        mask = mask.unsqueeze(1)
    return mask.expand(-1, batch, -1, -1, -1).flatten(0, 1)
