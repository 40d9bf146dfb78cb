"""CIFAR-100: small photographs of a hundred kinds of things, in twenty groups."""

from __future__ import annotations

from pathlib import Path

from mixfed.data.prepare import Pixels
from mixfed.data.sources import cifar
from mixfed.data.sources.base import Source, find

DESCRIPTION = "photographs, 100 classes in 20 groups, 32 x 32 colour; 50,000 + 10,000, or a subset"
OBTAIN = cifar.OBTAIN


def load(folder: Path | None = None) -> Source:
    """From ``cifar-100-python/`` if it is there, else from ``cifar100_subset.npz``.

    Field "y" has the class and "coarse" its group.
    """
    place = find(folder, OBTAIN, "cifar-100-python", "cifar100_subset.npz")
    if place.is_dir():
        train, test = (
            cifar.read_pickle(place / part, y="fine_labels", coarse="coarse_labels") for part in ("train", "test")
        )
    else:
        train, test = (cifar.read_subset(place, part, y="fine", coarse="coarse") for part in ("train", "test"))
    return Source(
        train=train,
        test=test,
        prepare=Pixels(),
        classes=100,
        natural_clients=None,
        description=f"{DESCRIPTION} (this is {place.name})",
        licence=cifar.LICENCE,
    )
