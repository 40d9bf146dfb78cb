"""Choosing settings: every method tries equally many points of a grid of its own.

A grid has a list of values for each of some keys of the recipe. It is the recipe's own, ``[tune.ALGORITHM.section]``,
or given with the command. What is chosen goes under ``[for.ALGORITHM.section]``, where a recipe looks for it.

::

    ALGORITHM-T-seedN/  the folder of each run, of trial T
    tuning.json         grids, trials with their scores, and the best ones
    tuned.toml          the chosen settings, for later runs
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from mixfed import rng
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.methods import find_algorithm, with_methods
from mixfed.experiments.own import short
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.files import folder_for, write_json, write_text
from mixfed.experiments.request import Request
from mixfed.experiments.schema import Table, shown
from mixfed.experiments.scores import require_metric, score, small_is_good, spread_of
from mixfed.experiments.texts import value_of
from mixfed.experiments.watch import UNWATCHED, Watch

Point = dict[str, Any]
"""One value for each key of a grid."""
Grid = dict[str, list[Any]]
Key = tuple[str, int, int]
"""A run: the algorithm, the number of its trial, the seed."""

_NEVER = (
    *("data", "evaluate", "seed", "algorithm", "for", "tune", "base", "name", "title", "paper", "published"),
    *("device", "checkpoint", "simulator"),
)
"""Sections and keys that are no settings of a method."""


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


def tune(
    request: Request,
    algorithms: Sequence[str],
    given: Iterable[str] | Mapping[str, Grid],
    seeds: Sequence[int],
    out: str | Path | None = None,
    *,
    trials: int | None = None,
    on: str = "validation",
    metric: str | None = None,
    last: int = 5,
    watch: Watch = UNWATCHED,
) -> tuple[dict[str, Any], Path]:
    """Tries equally many points of every algorithm's grid: what tuning.json holds, and the folder it is in.

    ``given`` are grids beside the recipe's own, or, by algorithm, those to use in their place. Finished runs in the
    folder are taken as they are.
    """
    base, algorithms = with_methods(request.base(), algorithms)
    every = dict(given) if isinstance(given, Mapping) else grids(base, algorithms, given)
    for name, grid in every.items():
        check_grid(name, grid)
    _refuse(request, on, last, every)
    points = drawn(every, trials)
    recipes = _recipes(request, base, points, seeds, on)
    first = next(iter(recipes.values()))
    metrics = [short(name) for name in first.evaluate.metrics] or ["accuracy"]
    metric = metric or ("accuracy" if "accuracy" in metrics else metrics[0])
    _refuse_equal(recipes)
    for recipe in recipes.values():
        require_metric(recipe, metric)
    from mixfed.experiments.runs import take_up, train_all  # PyTorch is loaded for what was not refused

    out = folder_for(Path(out) if out else None, f"{first.name}-tune")
    folders = take_up(recipes, out, lambda key: f"{key[0]}-{key[1]}-seed{key[2]}")
    results = train_all(recipes, folders, watch)
    scores = {key: score(folders[key].history(), metric, last) if run else None for key, run in results.items()}
    tried = {
        name: [Trial(point, [scores[name, i, seed] for seed in seeds]) for i, point in enumerate(settings)]
        for name, settings in points.items()
    }
    found = {
        **{"recipe": first.name, "on": on, "metric": metric, "best_of_last": last, "seeds": list(seeds)},
        **{"rounds": first.rounds, "trials": len(next(iter(points.values())))},
        "algorithms": {name: _summary(every[name], runs, metric) for name, runs in tried.items()},
    }
    write_json(out / "tuning.json", found)
    write_text(out / "tuned.toml", _tuned(found))
    return found, out


def grids(table: Table, algorithms: Sequence[str], given: Iterable[str] = ()) -> dict[str, Grid]:
    """The grid of each algorithm: the recipe's, then ``KEY=V1,V2`` for all and ``ALGORITHM:KEY=V1,V2`` for one."""
    own = toml.by_algorithm(table.get("tune", {}), "tune", table)
    for name in algorithms:
        find_algorithm(name, table)
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


def best(trials: Sequence[Trial], metric: str) -> Trial | None:
    """The trial with the best score, the first of equals; None where every one diverged."""
    sign = 1 if small_is_good(metric) else -1
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
    found = value_of(f"[{text}]")
    return found if isinstance(found, list) else [value_of(word.strip()) for word in text.split(",")]


def check_grid(name: str, grid: Grid) -> None:
    """Refuses a grid without a value to try, and one of settings that are not a method's."""
    if not grid:
        raise InputError(f"There is nothing to try for {name}; give --grid, or [tune.{name}] in the recipe.")
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"The values to try for '{key}' of {name} are a list, not {shown(values)}.")
        if key.split(".")[0] in _NEVER:
            raise InputError(f"'{key}' is not a setting of a method, so it is not tuned.")


def _recipes(
    request: Request, base: Table, points: Mapping[str, list[Point]], seeds: Sequence[int], on: str
) -> dict[Key, Recipe]:
    """The recipe of every run, seed by seed so that a seed's data are dealt once."""
    scored_on = {"evaluate.on": on} | ({"evaluate.sets": ["all"]} if on == "centre" else {})
    found: dict[Key, Recipe] = {}
    for seed in seeds:
        for name, settings in points.items():
            for i, point in enumerate(settings):
                table = with_settings(base, name, point)
                found[name, i, seed] = request.on(table, algorithm=name, seed=seed, **scored_on)
    return found


def _refuse(request: Request, on: str, last: int, grids: Mapping[str, Grid]) -> None:
    if on not in ("validation", "centre"):
        raise InputError(f"Settings are chosen on validation or centre, never on test data, so not on '{on}'.")
    if last < 1:
        raise InputError(f"A score is the best of the last 1 or more evaluations, not of {last}.")
    fixed = request.sets()
    if "evaluate.on" in fixed:
        raise InputError("What tune scores on is said with --on, not with --set evaluate.on.")
    for name, grid in grids.items():
        for key in grid:
            if key in fixed:
                raise InputError(f"'{key}' of {name} is to be tuned, and the command sets it to one value.")


def _refuse_equal(recipes: Mapping[Key, Recipe]) -> None:
    """Two trials that train alike would look like two that were tried."""
    seen: dict[str, Key] = {}
    for key, recipe in recipes.items():
        same = seen.setdefault(json.dumps(_what_trains(recipe), sort_keys=True), key)
        if same != key:
            raise InputError(
                f"Trials {same[1]} and {key[1]} of {key[0]} would train alike, because the grid repeats a value or has"
                f" only settings that {key[0]} does not use; mend its grid."
            )


def _what_trains(recipe: Recipe) -> Table:
    """The recipe as far as its algorithm uses it: without the settings of algorithms that it is not built on."""
    table, own = recipe.table(), recipe.algorithm_options()
    used = {recipe.algorithm, *(value for value in own.values() if isinstance(value, str))}
    return table | {"algorithms": {name: options for name, options in table["algorithms"].items() if name in used}}


def _summary(grid: Grid, trials: Sequence[Trial], metric: str) -> dict[str, Any]:
    chosen = best(trials, metric)
    return {
        "grid": grid,
        "trials": [{"settings": t.settings, **spread_of(t.scores)} for t in trials],
        "best": None if chosen is None else {"settings": chosen.settings, "score": chosen.score},
        "at_edge": [] if chosen is None else at_edge(grid, chosen.settings),
    }


def _tuned(found: Mapping[str, Any]) -> str:
    """The chosen settings as TOML that a later run takes."""
    table: Table = {"for": {}}
    for name, entry in found["algorithms"].items():
        if entry["best"]:
            table = with_settings(table, name, entry["best"]["settings"])
    told = f"{found['metric']} on {found['on']} data, {found['trials']} trials each, recipe {found['recipe']}"
    return f"# Chosen by mixfed tune: {told}.\n{tomli_w.dumps(table)}"
