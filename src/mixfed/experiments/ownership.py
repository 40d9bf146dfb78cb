"""Who holds what: how many examples, of which labels, together and client by client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays
from mixfed.data.scenario import Scenario
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError

MOST_LABELS = 20


@dataclass(frozen=True)
class Holding:
    """The examples that somebody holds, and how many of them have each label (by its name, where it has one)."""

    examples: int
    labels: dict[str, int]


def holdings(scenario: Scenario) -> dict[str, Holding]:
    """What the clients together, the centre, the validation and the test part hold, as far as there are such."""
    names = scenario.source.names.get("y", ())
    holders = {
        f"{len(scenario.clients):,} clients": scenario.clients,
        "centre": scenario.central,
        "centre, kept apart to tune on": scenario.of_centre,
        "validation": scenario.validation,
        "test": scenario.test,
    }
    return {holder: _holding(data, names) for holder, data in holders.items() if data is not None}


def _holding(data: FederatedData | CentralData, names: tuple[str, ...]) -> Holding:
    labels = data.arrays["y"]
    values, counts = np.unique(labels, return_counts=True)
    words = [names[int(v)] if 0 <= v < len(names) else str(v) for v in values]
    return Holding(len(labels), dict(zip(words, counts.tolist(), strict=True)))


@dataclass(frozen=True)
class Shares:
    """Labels of clients and centre: ``table`` has the counts [clients shown, labels], ``centre`` those of the centre.

    ``words`` name the labels, or ranges of labels where there are more than 20.
    """

    words: list[str]
    shown: NDArray[np.int64]
    table: NDArray[np.int64]
    sizes: NDArray[np.int64]
    centre: NDArray[np.int64] | None


def shares(
    data: FederatedData,
    central: CentralData | None = None,
    field: str = "y",
    most: int = 60,
    names: tuple[str, ...] | None = None,
) -> Shares:
    """The labels of at most ``most`` clients, spread evenly over the list, and of the centre."""
    if most < 1 or not data.clients:
        raise InputError("There is no client to draw; give data with clients and a max_clients of at least 1")
    shown = np.unique(np.linspace(0, data.clients - 1, min(most, data.clients)).round().astype(np.int64))
    bins = _Bins([_labels(data.arrays, field), *([] if central is None else [_labels(central.arrays, field)])])
    table = np.stack([bins.count(data.client(int(client))[field]) for client in shown])
    centre = None if central is None else bins.count(central.arrays[field])
    return Shares(bins.words(names), shown, table, data.sizes(), centre)


def _labels(arrays: Arrays, field: str) -> NDArray[Any]:
    if field not in arrays:
        raise InputError(f"There is no field '{field}' to draw; there are {', '.join(arrays)}")
    if arrays[field].ndim != 1:
        shape = arrays[field].shape
        raise InputError(f"The field '{field}' has shape {shape}; draw one with a single number per example")
    return arrays[field]


class _Bins:
    """Labels one by one where they are few, neighbours together where they are many."""

    def __init__(self, columns: list[NDArray[Any]]) -> None:
        self.values = np.unique(np.concatenate([np.unique(column) for column in columns]))
        if not len(self.values):
            raise InputError("There is no example to draw; give data that has some")
        self.parts = np.array_split(self.values, min(len(self.values), MOST_LABELS))
        self.part = np.repeat(np.arange(len(self.parts)), [len(part) for part in self.parts])

    def count(self, labels: NDArray[Any]) -> NDArray[np.int64]:
        return np.bincount(self.part[np.searchsorted(self.values, labels)], minlength=len(self.parts))

    def words(self, names: tuple[str, ...] | None) -> list[str]:
        known = dict(enumerate(names or ()))
        ends = [[known.get(value, f"{value:.4g}") for value in (part[0], part[-1])] for part in self.parts]
        return [first if first == last else f"{first} – {last}" for first, last in ends]
