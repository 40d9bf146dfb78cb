"""Choosing settings: every method tries equally many points of a grid of its own.

A grid has a list of values for each of some keys of the recipe. It is the recipe's own, ``[tune.ALGORITHM.section]``,
or given with the command. What is chosen goes under ``[for.ALGORITHM.section]``, where a recipe looks for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixfed import rng
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.schema import Table

Point = dict[str, Any]
"""One value for each key of a grid."""
Grid = dict[str, list[Any]]

_NEVER = ("data", "evaluate", "seed", "algorithm")
_SMALL_IS_GOOD = ("loss", "parity_gap", "odds_gap")


@dataclass(frozen=True)
class Trial:
    """A point and its score with every seed, None where the run diverged."""

    settings: Point
    scores: list[float | None]

    @property
    def score(self) -> float | None:
        """The mean over the seeds, if no run diverged."""
        numbers = [s for s in self.scores if s is not None]
        return math.fsum(numbers) / len(numbers) if len(numbers) == len(self.scores) else None


def grids(table: Table, algorithms: Sequence[str], given: Iterable[str] = ()) -> dict[str, Grid]:
    """The grid of each algorithm: the recipe's, then ``KEY=V1,V2`` for all and ``ALGORITHM:KEY=V1,V2`` for one."""
    own = toml.by_algorithm(table.get("tune", {}), "tune")
    for name in algorithms:
        toml.algorithm_named(name)
    found: dict[str, Grid] = {
        name: {".".join(parts): value for parts, value in toml.leaves(own.get(name, {}))} for name in algorithms
    }
    for text in given:
        left, equals, values = text.partition("=")
        name, colon, key = left.strip().rpartition(":")
        if not equals or not key or not values.strip():
            raise InputError(f"A grid is written key=value,value or algorithm:key=value,value, not '{text}'.")
        if colon and name not in found:
            raise InputError(f"The grid '{text}' is for '{name}', which is not one of {', '.join(algorithms)}.")
        for chosen in [name] if colon else algorithms:
            found[chosen][key] = _values(values)
    for name, grid in found.items():
        _check(name, grid)
    return found


def points(grid: Grid) -> list[Point]:
    """Every combination of a grid's values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def drawn(grids: Mapping[str, Grid], trials: int | None = None) -> dict[str, list[Point]]:
    """Equally many points of every grid: ``trials``, or as many as the smallest grid has, drawn where there are more.

    The draw is the same for every seed of the runs.
    """
    every = {name: points(grid) for name, grid in grids.items()}
    smallest = min(every, key=lambda name: len(every[name]))
    count = len(every[smallest]) if trials is None else trials
    if not 1 <= count <= len(every[smallest]):
        raise InputError(
            f"Every method gets the same number of trials, and the grid of {smallest} has {len(every[smallest])}"
            f" points, so it cannot be {count}."
        )
    chosen = {}
    for name, found in every.items():
        rows = rng.generator(0, f"tune/{name}").permutation(len(found))[:count]
        chosen[name] = [found[i] for i in sorted(rows.tolist())]
    return chosen


def with_settings(table: Table, algorithm: str, settings: Point) -> Table:
    """The table with these settings for the algorithm."""
    table = toml.override(table, ())
    for key, value in settings.items():
        toml.set_key(table, ["for", algorithm, *key.split(".")], value)
    return table


def best_of_last(history: Sequence[Mapping[str, Any]], metric: str, last: int) -> float | None:
    """The best value of the metric in the last so many evaluations; None where none is a number."""
    if history and metric not in history[-1]:
        known = ", ".join(name for name in history[-1] if name != "round")
        raise InputError(f"The runs have no metric '{metric}' to score by; they have {known}.")
    values = [entry[metric] for entry in history[-last:] if _is_number(entry[metric])]
    if not values:
        return None
    return float(min(values) if metric.startswith(_SMALL_IS_GOOD) else max(values))


def score(history: Sequence[Mapping[str, Any]], metric: str, last: int) -> float | None:
    """What a run is chosen by: its best of the last evaluations; None where it ended with a loss that is no number."""
    found = best_of_last(history, metric, last)
    end = history[-1] if history else {}
    ended_well = all(_is_number(value) for name, value in end.items() if name == metric or name.startswith("loss"))
    return found if ended_well else None


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def best(trials: Sequence[Trial], metric: str) -> Trial | None:
    """The trial with the best score, the first of equals; None where every one diverged."""
    sign = 1 if metric.startswith(_SMALL_IS_GOOD) else -1
    ranked = sorted((t for t in trials if t.score is not None), key=lambda t: sign * (t.score or 0.0))
    return ranked[0] if ranked else None


def at_edge(grid: Grid, settings: Point) -> list[str]:
    """Keys whose chosen number is the least or the greatest of three or more: a wider grid may have a better one."""
    found = []
    for key, values in grid.items():
        numbers = {v for v in values if isinstance(v, int | float) and not isinstance(v, bool)}
        if len(numbers) >= 3 and settings[key] in (min(numbers), max(numbers)):
            found.append(key)
    return found


def _values(text: str) -> list[Any]:
    found = toml.value_of(f"[{text}]")
    return found if isinstance(found, list) else [toml.value_of(word.strip()) for word in text.split(",")]


def _check(name: str, grid: Grid) -> None:
    if not grid:
        raise InputError(f"There is nothing to try for {name}; give --grid, or [tune.{name}] in the recipe.")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"The values to try for '{key}' of {name} are a list, not {values!r}.")
        if key.split(".")[0] in _NEVER:
            raise InputError(f"'{key}' is not a setting of a method, so it is not tuned.")
