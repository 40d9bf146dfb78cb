"""Where tensors are kept while nobody computes with them: on the device, in main memory, or in a file that is mapped.

The file has no name and goes with the last tensor in it; it is in the folder for temporary ones (``TMPDIR``). Its room
on the disk is reserved before it is mapped: a mapped file on a full disk ends the process without a word.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mixfed.errors import InputError

Place = Literal["device", "memory", "disk"]
_ZEROS = bytes(1 << 20)


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
        reserve(file, size, Path(tempfile.gettempdir()))
        return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(size,))).view(dtype).view(shape)


def moved(tensor: Tensor, place: Place) -> Tensor:
    """The tensor at this place; the same one where it is there already."""
    if place == "device" or (place == "memory" and tensor.device.type == "cpu"):
        return tensor
    return room(tuple(tensor.shape), tensor.dtype, tensor.device, place).copy_(tensor)


def reserve(file: BinaryIO, size: int, where: Path) -> None:
    """Makes the file so many bytes long, all of which the disk has room for, or says how many it has not."""
    before = os.fstat(file.fileno()).st_size
    try:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.seek(before)
            for start in range(before, size, len(_ZEROS)):
                file.write(_ZEROS[: size - start])
            file.flush()
    except (OSError, OverflowError) as error:
        file.truncate(before)
        told = getattr(error, "strerror", error)
        raise InputError(f"{size:,} bytes are needed on disk in {where}, and there is no room: {told}.") from error
