"""Images as bytes with channels first, and those of one source in the form of another's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.errors import InputError


def as_bytes(images: NDArray[Any], shape: tuple[int, int, int], what: str) -> NDArray[np.uint8]:
    """Images [n, channels, height, width] from 0 to 255, from such whole numbers with channels first or last."""
    channels, height, width = shape
    if images.ndim != 4 or images.shape[1:] not in (shape, (height, width, channels)):
        told = f"{list(images.shape)}, not [n, {channels}, {height}, {width}] or [n, {height}, {width}, {channels}]"
        raise InputError(f"{what} have the shape {told}; give them one of these")
    if images.dtype.kind not in "iu" or (images.size and not 0 <= images.min() <= images.max() <= 255):
        raise InputError(f"{what} are {images.dtype} and not bytes from 0 to 255; convert them first")
    first = images if images.shape[1:] == shape else images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(first, np.uint8)


def images_like(images: NDArray[Any], pattern: NDArray[Any]) -> NDArray[Any]:
    """Byte images [n, channels, height, width] with the channels and the size of the pattern's.

    Colours become their mean, a single channel is repeated, and sizes change by bilinear interpolation.
    """
    import torch
    import torch.nn.functional as F

    if images.ndim != 4 or pattern.ndim != 4 or images.dtype != np.uint8 or pattern.dtype != np.uint8:
        raise InputError("Only images in bytes, channels first, can be given the form of another source's images.")
    channels, size = pattern.shape[1], pattern.shape[2:]
    done = []
    for start in range(0, len(images), 1024):
        x = torch.from_numpy(images[start : start + 1024]).float()
        if x.shape[1] != channels:
            x = x.mean(1, keepdim=True).expand(-1, channels, -1, -1)
        if tuple(x.shape[2:]) != tuple(size):
            x = F.interpolate(x, size=size, mode="bilinear", antialias=True)
        done.append(x.round().clamp(0, 255).to(torch.uint8).numpy())
    return np.concatenate(done)
