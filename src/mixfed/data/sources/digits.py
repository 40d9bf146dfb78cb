"""Digits: 1,797 images of 8 x 8, embedded in scikit-learn, so that something real runs without any file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays, take
from mixfed.data.sources.base import Source
from mixfed.errors import InputError
from mixfed.rng import generator

DESCRIPTION = "handwritten digits, 10 classes, 8 x 8 grey flattened to 64 numbers; 1,438 + 359, no files needed"
OBTAIN = "scikit-learn, which has it inside"


def load(folder: Path | None = None) -> Source:
    """``x`` is float32 (n, 64) from 0 to 1. The test part is a fixed fifth of every class."""
    table = _table()
    arrays: Arrays = {"x": (table[:, :-1] / 16).astype(np.float32), "y": table[:, -1].astype(np.int64)}
    test = np.zeros(len(arrays["y"]), np.bool_)
    for label in range(10):
        rows = generator(0, "sources/digits", label).permutation(np.flatnonzero(arrays["y"] == label))
        test[rows[: round(len(rows) / 5)]] = True
    return Source(
        train=take(arrays, np.flatnonzero(~test)),
        test=take(arrays, np.flatnonzero(test)),
        prepare=None,
        classes=10,
        natural_clients=None,
        description=DESCRIPTION,
        licence="CC BY 4.0 (UCI, optical recognition of handwritten digits)",
        names={"y": tuple("0123456789")},
    )


def _table() -> NDArray[Any]:
    """64 pixels and a label a line: the file of scikit-learn, which itself takes longer to import than PyTorch."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise InputError(
            "the source 'digits' is a file of scikit-learn, which is not installed; pip install scikit-learn"
        )
    return np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
