"""CIFAR-100: small photographs of a hundred kinds of things, in twenty groups."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mixfed.data.prepare import Pixels
from mixfed.data.sources import cifar
from mixfed.data.sources.base import Source, find

DESCRIPTION = "photographs, 100 classes in 20 groups, 32 x 32 colour; 50,000 + 10,000, or a subset"
OBTAIN = cifar.OBTAIN


def load(folder: Path | None = None, labels: Literal["fine", "coarse"] = "fine") -> Source:
    """From ``cifar-100-python/`` if it is there, else from ``cifar100_subset.npz``.

    Field "y" has the class and "coarse" its group; with ``labels = "coarse"`` it has the group, and "fine" the class.
    """
    y, other = ("fine", "coarse") if labels == "fine" else ("coarse", "fine")
    place = find(folder, OBTAIN, "cifar-100-python", "cifar100_subset.npz")
    if place.is_dir():
        train, test = (
            cifar.read_pickle(place / part, **{"y": f"{y}_labels", other: f"{other}_labels"})
            for part in ("train", "test")
        )
    else:
        train, test = (cifar.read_subset(place, part, **{"y": y, other: other}) for part in ("train", "test"))
    return Source(
        train=train,
        test=test,
        prepare=Pixels(),
        classes=100 if labels == "fine" else 20,
        natural_clients=None,
        description=f"{DESCRIPTION} (this is {place.name})",
        licence=cifar.LICENCE,
    )
