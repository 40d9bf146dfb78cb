"""What a source gives, and where its files are looked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays, Prepare, Rows, take
from mixfed.data.encoding import Encoding
from mixfed.errors import InputError


@dataclass(frozen=True, eq=False)
class Examples:
    """Arrays with the person (or article, …) that each example comes from, where that is known."""

    arrays: Arrays
    people: NDArray[Any] | None

    def rows(self, rows: Rows) -> Examples:
        """The given ones, copied."""
        return Examples(take(self.arrays, rows), None if self.people is None else self.people[rows])

    def __len__(self) -> int:
        return len(self.arrays["y"])


@dataclass(frozen=True, eq=False)
class Source:
    """A known dataset: training and test examples, and what is known of who they come from.

    ``natural_clients`` has, per part ("train", "test"), one client key for every example. ``names`` gives words
    for the numbers in a field (its classes), or for the columns of "x". ``centre`` is what by nature is not on
    clients, for sources of two kinds of examples. ``vocabulary`` is how many different numbers a text has, and
    ``encoding`` how the columns of files became numbers. ``scaled`` are fields to be brought to mean 0 and deviation 1
    by training examples alone, each with the numbers of an example that are (:func:`mixfed.data.scaling.fit_scaling`).
    """

    train: Arrays
    test: Arrays
    prepare: Prepare | None
    classes: int | None
    natural_clients: dict[str, NDArray[Any]] | None
    description: str
    licence: str
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    centre: Examples | None = None
    vocabulary: int | None = None
    encoding: Encoding | None = None
    scaled: dict[str, NDArray[np.bool_] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = {"training": self.train, "test": self.test} | ({"central": self.centre.arrays} if self.centre else {})
        for part, arrays in parts.items():
            labels = arrays.get("y")
            if self.classes is None or labels is None or not labels.size or labels.dtype.kind not in "iu":
                continue
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.classes:
                raise InputError(
                    f"The {part} labels go from {low} to {high}, and this source has the classes 0 to"
                    f" {self.classes - 1}; its files are damaged, or not what they seem."
                )


@dataclass(frozen=True)
class SourceInfo:
    """How a source is loaded (``load(folder, **options)``), what it is, and where its files can be had."""

    load: Callable[..., Source]
    description: str
    obtain: str


def find(folder: Path | None, obtain: str, *names: str) -> Path:
    """The first of ``names`` (or its .gz) that exists in the data folder."""
    place = data_folder(folder)
    for name in names:
        for file in (place / name, place / f"{name}.gz"):
            if file.exists():
                return file
    raise InputError(f"'{' or '.join(names)}' is not in the data folder '{place}'; get it from {obtain}")


def data_folder(folder: Path | None) -> Path:
    """The given folder, or else the one that the environment variable MIXFED_DATA names."""
    place = folder or os.environ.get("MIXFED_DATA")
    if not place:
        raise InputError("no data folder is known; give one or set the environment variable MIXFED_DATA to it")
    if not Path(place).is_dir():
        raise InputError(f"the data folder '{place}' does not exist; make it or name another")
    return Path(place)
