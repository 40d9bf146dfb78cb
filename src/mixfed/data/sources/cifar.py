"""The two formats of CIFAR: the original Python pickles, and a subset in one .npz file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mixfed.data._arrays import Arrays
from mixfed.data._files import load_npz, reading

OBTAIN = "www.cs.toronto.edu/~kriz/cifar.html (the Python version, unpacked)"
LICENCE = "none stated; research use, cite Krizhevsky (2009)"


def read_pickle(file: Path, **labels: str) -> Arrays:
    """One original batch; ``labels`` maps our fields to the keys in the file."""
    with reading(file), file.open("rb") as stream:
        batch = _ArraysOnly(stream, encoding="bytes").load()
        images = np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32)
        return _fields(images, {ours: batch[theirs.encode()] for ours, theirs in labels.items()})


def read_subset(file: Path, part: str, **labels: str) -> Arrays:
    """One part of a .npz file with ``x_train`` (n, 32, 32, 3), ``x_test`` and labels named alike."""
    arrays = load_npz(file, [f"{name}_{part}" for name in ("x", *labels.values())])
    with reading(file):
        images = np.ascontiguousarray(arrays[f"x_{part}"].reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))
        return _fields(images, {ours: arrays[f"{theirs}_{part}"] for ours, theirs in labels.items()})


def _fields(images: NDArray[Any], labels: dict[str, ArrayLike]) -> Arrays:
    fields = {"x": images.astype(np.uint8, copy=False)}
    fields |= {name: np.asarray(values, np.int64) for name, values in labels.items()}
    if len({len(values) for values in fields.values()}) != 1:
        raise ValueError("images and labels differ in number")
    return fields


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds NumPy arrays and nothing else: an ordinary pickle may run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]  # the same function, wherever this NumPy keeps it
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")
