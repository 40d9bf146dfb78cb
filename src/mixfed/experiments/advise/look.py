"""Who holds what, as far as it decides between methods."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import join
from mixfed.data.scenario import Scenario
from mixfed.data.store import CentralData, FederatedData
from mixfed.experiments.recipe import Recipe
from mixfed.rng import generator

SHARE = 0.1
"""The share of the training examples that is kept apart to choose on, where a recipe keeps none."""
ENOUGH = 4000
"""So many examples are judged by at most: a trial is evaluated often, and more of them would take most of its time."""


@dataclass(frozen=True)
class Look:
    """What was seen: ``skew`` is the mean distance (total variation, 0 to 1) of a client's labels from all clients'.

    ``shift`` is how far the mean features of the centre lie from the clients', in standard deviations. ``only_centre``
    and ``only_clients`` are labels that one side alone has. ``other_domain`` says that the centre's labels are not the
    task's, ``late`` that some clients report late or never, and ``joining`` that a device joins, after which most
    others are asked no more.
    """

    clients: int
    smallest: int
    largest: int
    central: int
    skew: float | None
    shift: float | None
    only_centre: list[int]
    only_clients: list[int]
    other_domain: bool
    late: bool
    joining: bool

    def words(self) -> list[str]:
        """What was seen, in sentences."""
        held = f"{self.central:,} examples" if self.central else "nothing"
        told = [
            f"{self.clients:,} clients hold {self.smallest:,} to {self.largest:,} examples each, the centre {held}."
        ]
        if self.skew is not None:
            how = "alike" if self.skew < 0.1 else "unlike" if self.skew < 0.5 else "very unlike"
            told.append(f"The labels of clients are {how} (distance {self.skew:.2f} of at most 1).")
        if self.shift is not None:
            how = "alike" if self.shift < 0.1 else "unlike" if self.shift < 0.5 else "very unlike"
            told.append(f"The features of clients and centre are {how} ({self.shift:.2f} standard deviations apart).")
        if self.other_domain:
            told.append("The centre's examples are of another domain.")
        if self.only_centre:
            told.append(f"Only the centre has the labels {_listed(self.only_centre)}.")
        if self.only_clients:
            told.append(f"Only clients have the labels {_listed(self.only_clients)}.")
        if self.late:
            told.append("Some clients are late.")
        if self.joining:
            told.append("A device joins later, and from then on few others are asked.")
        return told


def look_at(recipe: Recipe, scenario: Scenario) -> Look:
    """Looks at a recipe's data and schedule."""
    sizes = scenario.clients.sizes()
    other = recipe.data.central.kind == "other"
    theirs = _labels(scenario.clients)
    ours = None if scenario.central is None or other else _labels(scenario.central)
    schedule = recipe.schedule
    return Look(
        clients=len(scenario.clients),
        smallest=int(sizes.min()),
        largest=int(sizes.max()),
        central=0 if scenario.central is None else len(scenario.central),
        skew=None if theirs is None else _skew(scenario.clients, theirs),
        shift=None if scenario.central is None else _shift(scenario.clients, scenario.central),
        only_centre=_without(ours, theirs),
        only_clients=_without(theirs, ours),
        other_domain=other,
        late=schedule.delay != "none" or bool(schedule.dropout) or bool(schedule.concurrency),
        joining=recipe.data.joining.round > 0,
    )


def with_validation(scenario: Scenario, seed: int) -> Scenario:
    """The scenario with examples to choose on that are not the test's, of clients and of the centre."""
    return _not_too_many(_with_validation(scenario, seed), seed)


def _not_too_many(scenario: Scenario, seed: int) -> Scenario:
    kept = scenario.validation
    if kept is None or len(kept) <= ENOUGH:
        return scenario
    rows = np.sort(generator(seed, "advise/judged by").permutation(len(kept))[:ENOUGH])
    of_clients = scenario.like_clients.get("validation")
    like = scenario.like_clients | {"validation": None if of_clients is None else of_clients[rows]}
    return replace(scenario, validation=kept.select(rows), like_clients=like)


def _with_validation(scenario: Scenario, seed: int) -> Scenario:
    if scenario.validation is not None and "validation" in scenario.own:
        return scenario
    parts = scenario.clients.split({"train": 1 - SHARE, "validation": SHARE}, seed)
    own = {"validation": parts["validation"]} | scenario.own
    if scenario.validation is not None:
        return replace(scenario, clients=parts["train"], own=own)
    arrays, central = [parts["validation"].arrays], scenario.central
    alike = central is not None and central.arrays.keys() == arrays[0].keys()
    if central is not None and alike and len(central) >= 2 / SHARE and _same_shapes(central, parts["train"]):
        split = central.split({"train": 1 - SHARE, "validation": SHARE}, seed)
        central, arrays = split["train"], [*arrays, split["validation"].arrays]
    together = CentralData(join(arrays), scenario.clients.prepare)
    kinds = scenario.like_clients.get("test") is not None
    of_clients = np.arange(len(together)) < parts["validation"].examples if kinds else None
    like = scenario.like_clients | {"validation": of_clients}
    return replace(scenario, clients=parts["train"], central=central, validation=together, own=own, like_clients=like)


def _same_shapes(central: CentralData, clients: FederatedData) -> bool:
    return all(
        x.shape[1:] == clients.arrays[n].shape[1:] and x.dtype == clients.arrays[n].dtype
        for n, x in central.arrays.items()
    )


def _labels(data: FederatedData | CentralData) -> NDArray[np.int64] | None:
    """The different labels, where examples have one class each."""
    labels = data.arrays.get("y")
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "biu":
        return None
    found = np.unique(labels).astype(np.int64)
    return found if len(found) <= 1000 else None


def _without(labels: NDArray[np.int64] | None, others: NDArray[np.int64] | None) -> list[int]:
    return [] if labels is None or others is None else [int(x) for x in np.setdiff1d(labels, others)]


def _skew(clients: FederatedData, known: NDArray[np.int64]) -> float:
    counts = np.zeros((len(clients), len(known)))
    np.add.at(counts, (clients.owners(), np.searchsorted(known, clients.arrays["y"])), 1)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return float(np.abs(shares - counts.sum(axis=0) / counts.sum()).sum(axis=1).mean() / 2)


def _shift(clients: FederatedData, central: CentralData) -> float | None:
    theirs, ours = (_features(data) for data in (clients, central))
    if theirs is None or ours is None or theirs.shape[1:] != ours.shape[1:]:
        return None
    deviation = np.concatenate([theirs, ours]).std(axis=0)
    apart = np.abs(theirs.mean(axis=0) - ours.mean(axis=0))
    return float((apart / np.maximum(deviation, 1e-6))[deviation > 1e-6].mean()) if (deviation > 1e-6).any() else 0.0


def _features(data: FederatedData | CentralData) -> NDArray[np.float64] | None:
    """The features of some examples, where they are measurements: floats, or the bytes of images."""
    x = data.arrays.get("x")
    if x is None or x.ndim < 2 or not (x.dtype.kind == "f" or x.dtype == np.uint8):
        return None
    rows = np.linspace(0, len(x) - 1, min(len(x), 2000)).astype(np.int64)
    return x[rows].reshape(len(rows), -1).astype(np.float64)


def _listed(labels: list[int]) -> str:
    return ", ".join(map(str, labels[:10])) + (", …" if len(labels) > 10 else "")
