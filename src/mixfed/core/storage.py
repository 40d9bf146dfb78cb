"""Where tensors are kept while nobody computes with them: on the device, in main memory, or in a file that is mapped.

The file has no name and goes with the last tensor in it; it is in the folder for temporary ones (``TMPDIR``). Its room
on the disk is reserved before it is mapped: a mapped file on a full disk ends the process without a word.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mixfed.data._disk import reserve
from mixfed.errors import InputError

Place = Literal["device", "memory", "disk"]


def check_place(place: str, what: str) -> None:
    """Refuses a place that there is not."""
    if place not in get_args(Place):
        raise InputError(f"{what} are kept on the device, in memory or on disk, not at '{place}'.")


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, place: Place) -> Tensor:
    """Zeros at this place."""
    size = int(np.prod(shape)) * dtype.itemsize
    if place != "disk" or not size:
        return torch.zeros(shape, dtype=dtype, device=device if place == "device" else "cpu")
    with tempfile.TemporaryFile() as file:
        reserve(file, 0, size, Path(tempfile.gettempdir()))
        return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(size,))).view(dtype).view(shape)


def moved(tensor: Tensor, place: Place) -> Tensor:
    """The tensor at this place; the same one where it is there already."""
    if place == "device" or (place == "memory" and tensor.device.type == "cpu"):
        return tensor
    return room(tuple(tensor.shape), tensor.dtype, tensor.device, place).copy_(tensor)
