"""Attention under vmap: PyTorch's fused operator has no rule for it, and would run the clients one by one.

softmax(q·kᵀ)·v has no weights, so that the clients of a chunk are only a larger batch: [clients, batch, …] is folded
into [clients·batch, …] and back, for the operator and for its gradient. :class:`SelfAttention` has its queries, keys
and values in memory so that nothing is copied for this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixfed.models import vmap
from mixfed.models.products import linear

_OPERATORS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_registered: list[Any] = []


class SelfAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose self-attention leaves what it projects where it is.

    PyTorch's own moves the sequence to the front and copies queries, keys and values apart, and their gradients
    together, each by way of a tensor that is three times as large.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """``forward`` of PyTorch's own, to which all that is not plain self-attention is left."""
        weight = self.in_proj_weight
        masked_alike = attn_mask is not None and attn_mask.ndim == 2
        if (
            not (query is key is value and query.ndim == 3)
            or weight is None
            or need_weights
            or key_padding_mask is not None
            or not (masked_alike or (attn_mask is None and not is_causal))
            or self.bias_k is not None
            or self.add_zero_attn
            or (self.dropout and self.training)
        ):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        x = query if self.batch_first else query.transpose(0, 1)
        projected = linear(x, weight, self.in_proj_bias).view(*x.shape[:2], 3, self.num_heads, -1)
        q, k, v = projected.transpose(1, 3).unbind(2)
        mask = None if is_causal or attn_mask is None else attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask  # PyTorch's layer marks what is left out, its operator what is seen
        found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        answer = self.out_proj(found.transpose(1, 2).flatten(2))
        return answer if self.batch_first else answer.transpose(0, 1), None


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
