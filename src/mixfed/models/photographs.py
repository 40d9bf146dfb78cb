"""Images in the form that networks trained on photographs expect."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation of the colours of ImageNet."""


def as_photographs(images: Tensor, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Images [batch, channels, height, width] of values 0 to 1 in three colours, ``size`` pixels wide and high (0: as
    they are), less the mean and over the standard deviation of each colour."""
    if size and images.shape[-2:] != (size, size):
        images = F.interpolate(images, size=(size, size), mode="bilinear")
    shift, scale = (torch.tensor(v, dtype=images.dtype, device=images.device)[:, None, None] for v in (mean, std))
    return (images.expand(*images.shape[:-3], 3, *images.shape[-2:]) - shift) / scale
