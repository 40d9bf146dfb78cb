"""What a report shows, as plain values: a view for each run, and groups of views that differ in the seed only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.experiments.recipe import Recipe
from mixfed.experiments.scores import half_interval, spread_of

Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class View:
    """One run: its recipe, what result.json says, and what it wrote down on the way."""

    recipe: Recipe
    folder: Path
    result: Mapping[str, Any]
    history: Entries = ()
    costs: Entries = ()
    diagnostics: Entries = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """The runs of one method, one for each seed."""

    views: Sequence[View]

    @property
    def first(self) -> View:
        """A run to take what all seeds have in common from."""
        return self.views[0]

    def metrics(self) -> list[str]:
        """The names of all metrics that were evaluated."""
        return list(dict.fromkeys(name for view in self.views for e in view.history for name in e if name != "round"))

    def figures(self, metric: str) -> dict[str, Any]:
        """Mean, spread and values of the metric as the results have it."""
        return spread_of([view.result["metrics"].get(metric) for view in self.views])

    def cost(self, name: str) -> float:
        """The mean over the runs of a cost of the ledger."""
        return float(np.mean([view.result["ledger"].get(name, 0) for view in self.views]))

    def curve(self, metric: str) -> dict[str, NDArray[np.float64]]:
        """Columns over the evaluated rounds: the metric's mean, its spread and half the mean's 95% interval, and what a
        run had cost by then."""
        values: dict[int, list[float]] = {}
        prices: dict[int, list[tuple[float, float]]] = {}
        for view in self.views:
            for entry in view.history:
                if entry.get(metric) is not None:
                    values.setdefault(entry["round"], []).append(entry[metric])
            for entry in view.costs:
                prices.setdefault(entry["round"], []).append((entry["bytes"], entry["seconds"]))
        rounds = sorted(values)
        mean = np.array([np.mean(values[r]) for r in rounds])
        spread = np.array([np.std(values[r], ddof=1) if len(values[r]) > 1 else 0.0 for r in rounds])
        half = np.array([half_interval(values[r]) or 0.0 for r in rounds])
        price = np.array([np.mean(prices.get(r, [(np.nan, np.nan)]), axis=0) for r in rounds]).reshape(-1, 2)
        return {
            "round": np.array(rounds, float),
            "mean": mean,
            "spread": spread,
            "low": mean - spread,
            "high": mean + spread,
            "surely_above": mean - half,
            "surely_below": mean + half,
            "bytes": price[:, 0],
            "seconds": price[:, 1],
        }

    def client_values(self, metric: str) -> NDArray[np.float64]:
        """The metric of single clients, of all seeds together."""
        found = [view.facts.get("clients", {}) for view in self.views]
        values = [v for each in found if each.get("metric") == metric for v in each["values"] if v is not None]
        return np.array(values, float)


def grouped(views: Sequence[View]) -> dict[str, Group]:
    """Runs of the same method together; where one name would stand for different settings, the folder tells them
    apart."""
    methods: dict[str, list[View]] = {}
    for view in views:
        methods.setdefault(view.recipe.algorithm, []).append(view)
    groups: dict[str, Group] = {}
    for name, same in methods.items():
        kinds: dict[str, list[View]] = {}
        for view in same:
            kinds.setdefault(_but_for_the_seed(view.recipe), []).append(view)
        for kind in kinds.values():
            label = name if len(kinds) == 1 else f"{name} ({kind[0].folder.parent.name or '.'}/{kind[0].folder.name})"
            groups[label] = Group(kind)
    return groups


def _but_for_the_seed(recipe: Recipe) -> str:
    table = recipe.table()
    return repr({key: value for key, value in table.items() if key not in ("seed", "simulator", "name")})
