"""CIFAR-10: small photographs of ten kinds of things."""

from __future__ import annotations

from pathlib import Path

from mixfed.data._arrays import join
from mixfed.data.prepare import Pixels
from mixfed.data.sources import cifar
from mixfed.data.sources.base import Source, find

DESCRIPTION = "photographs, 10 classes, 32 x 32 colour; 50,000 + 10,000, or a subset"
OBTAIN = cifar.OBTAIN
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the channels over the training part."""


def load(folder: Path | None = None, standardised: bool = False) -> Source:
    """From ``cifar-10-batches-py/`` if it is there, else from ``cifar10_subset.npz``.

    Pixels are from 0 to 1, or ``standardised`` to mean 0 and variance 1 in every channel.
    """
    place = find(folder, OBTAIN, "cifar-10-batches-py", "cifar10_subset.npz")
    if place.is_dir():
        train = join([cifar.read_pickle(place / f"data_batch_{number}", y="labels") for number in range(1, 6)])
        test = cifar.read_pickle(place / "test_batch", y="labels")
    else:
        train, test = (cifar.read_subset(place, part, y="y") for part in ("train", "test"))
    return Source(
        train=train,
        test=test,
        prepare=Pixels(MEAN, STD) if standardised else Pixels(),
        classes=10,
        natural_clients=None,
        description=f"{DESCRIPTION} (this is {place.name})",
        licence=cifar.LICENCE,
        names={"y": NAMES},
    )
