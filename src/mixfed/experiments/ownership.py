"""Who holds what in a recipe: how many examples, of which labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mixfed.data.scenario import Scenario
from mixfed.data.store import CentralData, FederatedData


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
