"""The memory layout that convolutions on a processor like: channels last. The numbers are the same."""

from __future__ import annotations

import torch
from torch import Tensor

from mixfed.core.tree import Params


def channels_last(params: Params) -> Params:
    """Leaves that are shaped as images [n, channels, height, width] in this layout."""
    return {n: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for n, x in params.items()}


def images_of_steps(fields: Params) -> Params:
    """Batches of images [steps, batch, channels, height, width], every step's on its own."""
    return {n: _each(x) if x.ndim == 5 else x for n, x in fields.items()}


def _each(x: Tensor) -> Tensor:
    """Even where one channel makes both layouts the same, the strides tell convolutions which one to go on with."""
    y = x.flatten(0, 1).clone(memory_format=torch.channels_last)
    return y.as_strided(x.shape, (x.shape[1] * y.stride(0), *y.stride()))
