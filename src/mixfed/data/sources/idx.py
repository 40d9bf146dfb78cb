"""The idx format of MNIST and of the sets made in its likeness."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays
from mixfed.data._files import content, reading
from mixfed.data.sources.base import find
from mixfed.errors import InputError


def load_part(folder: Path | None, obtain: str, name: str, part: str) -> Arrays:
    """Images (n, 1, height, width) as bytes and labels as int64, of part "train" or "t10k"."""
    images = find(folder, obtain, f"{name}/{part}-images-idx3-ubyte")
    labels = find(folder, obtain, f"{name}/{part}-labels-idx1-ubyte")
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise InputError(f"'{images}' has {len(x)} images but '{labels}' {len(y)} labels; get both again from {obtain}")
    return {"x": x[:, None], "y": y.astype(np.int64)}


def read_idx(file: Path, dimensions: int) -> NDArray[np.uint8]:
    """The bytes of an idx file, plain or gzipped: a magic number, the sizes, the values."""
    with reading(file):
        found = content(file)
        magic, *sizes = struct.unpack_from(f">{1 + dimensions}I", found)
        start = 4 * (1 + dimensions)
        if magic != 0x0800 + dimensions or len(found) != start + math.prod(sizes):
            raise ValueError(f"not an idx file of {dimensions} dimensions of bytes, or not all of it")
        return np.frombuffer(found, np.uint8, offset=start).reshape(sizes)
