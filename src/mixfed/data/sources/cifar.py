"""The two formats of CIFAR: the original Python pickles, and a subset in one .npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mixfed.data import _pickles
from mixfed.data._arrays import Arrays, whole_numbers
from mixfed.data._files import content, load_npz, reading
from mixfed.data.images import as_bytes
from mixfed.errors import InputError

OBTAIN = "www.cs.toronto.edu/~kriz/cifar.html (the Python version, unpacked)"
LICENCE = "none stated; research use, cite Krizhevsky (2009)"


def read_pickle(file: Path, **labels: str) -> Arrays:
    """One original batch; ``labels`` maps our fields to the keys in the file."""
    with reading(file):
        batch = _pickles.read(content(file))
        images = _pickles.array(batch["data"])
        if images.shape[1:] == (3072,):
            images = images.reshape(-1, 3, 32, 32)
        return _fields(file, images, {ours: _pickles.array(batch[theirs]) for ours, theirs in labels.items()})


def read_subset(file: Path, part: str, **labels: str) -> Arrays:
    """One part of a .npz file with ``x_train`` (n, 32, 32, 3), ``x_test`` and labels named alike."""
    arrays = load_npz(file, [f"{name}_{part}" for name in ("x", *labels.values())])
    return _fields(file, arrays[f"x_{part}"], {ours: arrays[f"{theirs}_{part}"] for ours, theirs in labels.items()})


def _fields(file: Path, images: NDArray[Any], labels: dict[str, NDArray[Any]]) -> Arrays:
    fields: Arrays = {"x": as_bytes(images, (3, 32, 32), f"the images in '{file}'")}
    for name, values in labels.items():
        fields[name] = whole_numbers(values, f"the labels '{name}' in '{file}'")
        if values.shape != (len(images),):
            told = f"labels '{name}' of shape {list(values.shape)} for {len(images):,} images"
            raise InputError(f"'{file}' has {told}; it needs one number for each")
    return fields
