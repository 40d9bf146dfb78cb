"""Dropout whose masks are a function of a key, so that every client has its own and every executor draws the same.

PyTorch's dropout draws from one global generator, in the order in which clients happen to run, and cannot give each
client of a vmapped cohort the mask it would have had alone. While :class:`KeyedDropout` is active, the dropout family
draws from (key, how many draws came before, element) instead. The module needs no change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mixfed import rng
from mixfed.errors import InputError

_ELEMENTWISE = {F.dropout, torch.dropout}
_CHANNELWISE = {F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout}
_REFUSED = {F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout}


class KeyedDropout(TorchFunctionMode):
    """Replaces dropout by keyed dropout for the duration of a ``with`` block; ``met`` tells whether there was any."""

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key = key
        self.draws = 0
        self.met = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _REFUSED:
            raise InputError("Alpha dropout cannot be drawn per client; use nn.Dropout instead.")
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or (len(args) > 4 and args[4])):
            raise InputError("Dropout inside scaled_dot_product_attention cannot be drawn per client; set it to 0.")
        if func in _ELEMENTWISE or func in _CHANNELWISE:
            self.met = True
            return self._drop(*args, channels=func in _CHANNELWISE, **kwargs)
        return func(*args, **kwargs)

    def _drop(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
        *,
        channels: bool,
    ) -> Tensor:
        if not (training if train is None else train) or p == 0.0:
            return input
        if self.key is None:
            raise InputError("A model with dropout trains on batches that carry a 'key' to draw its masks from.")
        shape = (*input.shape[:2], *(1,) * (input.ndim - 2)) if channels else tuple(input.shape)
        elements = torch.arange(torch.Size(shape).numel(), device=input.device).reshape(shape)
        keep = rng.tensor_uniform(self.key, elements + (self.draws << 40)) >= p
        self.draws += 1
        return input * keep.to(input.dtype) / (1.0 - p if p < 1.0 else 1.0)


def uses_dropout(module: nn.Module) -> bool:
    """Whether the module has dropout layers; refuses what cannot be drawn per client."""
    for child in module.modules():
        if isinstance(child, nn.RNNBase) and child.dropout:
            raise InputError(
                "Dropout between the layers of a recurrent module cannot be drawn per client; set it to 0."
            )
        if isinstance(child, nn.MultiheadAttention) and child.dropout:
            raise InputError("Dropout inside nn.MultiheadAttention cannot be drawn per client; set it to 0.")
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())
