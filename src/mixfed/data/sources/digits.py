"""Digits: 1,797 images of 8 x 8, embedded in scikit-learn, so that something real runs without any file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mixfed.data._arrays import take
from mixfed.data.sources.base import Source
from mixfed.rng import generator

DESCRIPTION = "handwritten digits, 10 classes, 8 x 8 grey flattened to 64 numbers; 1,438 + 359, no files needed"
OBTAIN = "scikit-learn, which has it inside"


def load(folder: Path | None = None) -> Source:
    """``x`` is float32 (n, 64) from 0 to 1. The test part is a fixed fifth of every class."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    arrays = {"x": (digits.data / 16).astype(np.float32), "y": digits.target.astype(np.int64)}
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
