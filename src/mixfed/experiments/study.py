"""Studies: a recipe run at several settings, as the papers' appendices do.

::

    P-ALGORITHM-seedN/  the folder of each run, at point number P
    study.json          the metric's mean, spread and values by point and algorithm, and how many runs diverged
    study.png           the metric over the points
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mixfed.errors import InputError
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.files import write_json
from mixfed.experiments.request import Request
from mixfed.experiments.schema import check, nearest
from mixfed.experiments.scores import require_metric, spread_of
from mixfed.experiments.texts import study_table
from mixfed.experiments.watch import UNWATCHED, Watch

Key = tuple[int, str, int]
"""A run: the number of its point, the algorithm, the seed."""


@dataclass(frozen=True)
class Study:
    """Settings to compare: every point is a label and the settings that make it, for every algorithm."""

    name: str
    title: str
    recipe: str
    algorithms: list[str]
    metric: str
    points: dict[str, list[str]]
    paper: str = ""
    settings: tuple[str, ...] = ()

    def on(self, recipe: str) -> Study:
        """The same settings compared on another recipe, of which the paper says nothing."""
        stem = Path(recipe).stem
        return replace(self, name=f"{self.name}-{stem}", title=f"{self.title} ({stem})", recipe=recipe, paper="")


def load(name: str) -> Study:
    """A packaged study by its name, or one of the user's by the path of its TOML file."""
    stem, table = study_table(name)
    try:
        return _study(stem, table)
    except InputError as error:
        told = str(error).rstrip(".")
        raise InputError(
            f"The study '{stem}' is not well formed ({told}); it needs title, recipe, algorithms, metric and points"
            " with label and set."
        ) from error


def run_study(
    request: Request, study: Study, seeds: Sequence[int], out: str | Path, watch: Watch = UNWATCHED
) -> dict[str, Any]:
    """Runs every point with every algorithm and seed, and sums up: what study.json holds.

    ``request`` is the study's recipe with the user's own settings. Finished runs in the folder are taken as they are.
    """
    out, recipes = Path(out), _recipes(request, study, seeds)
    for recipe in recipes.values():
        require_metric(recipe, study.metric)
    from mixfed.experiments.report.plot import plot_study
    from mixfed.experiments.runs import take_up, train_all  # PyTorch is loaded for what was not refused

    folders = take_up(recipes, out, lambda key: f"{key[0]}-{key[1]}-seed{key[2]}")
    results = train_all(recipes, folders, watch)
    summary = {
        point: {name: _summary(study, [results[i, name, seed] for seed in seeds]) for name in study.algorithms}
        for i, point in enumerate(study.points)
    }
    found = {"study": study.name, "metric": study.metric, "points": summary}
    write_json(out / "study.json", found)
    plot_study(out / "study.png", study.title, study.metric, summary)
    return found


def _recipes(request: Request, study: Study, seeds: Sequence[int]) -> dict[Key, Recipe]:
    base, found = request.base(), {}
    for seed in seeds:
        for number, settings in enumerate(study.points.values()):
            at = request.with_settings([*study.settings, *settings])
            for name in study.algorithms:
                found[number, name, seed] = at.on(base, algorithm=name, seed=seed)
    return found


def _summary(study: Study, runs: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    values = [None if run is None else run["metrics"].get(study.metric) for run in runs]
    return {**spread_of(values), "diverged": sum(value is None for value in values)}


_KEYS = {"title": str, "recipe": str, "algorithms": list[str], "metric": str, "paper": str, "set": list[str]}


def _study(name: str, table: Mapping[str, Any]) -> Study:
    given = {key: value for key, value in table.items() if key != "points"}
    for key in given:
        if key not in _KEYS:
            raise InputError(f"there is no key '{key}'; did you mean '{nearest(key, [*_KEYS, 'points'])}'?")
    for key in ("title", "recipe", "algorithms", "metric", "points"):
        if key not in table:
            raise InputError(f"'{key}' is missing")
    found = {key: check(value, _KEYS[key], key) for key, value in given.items()}
    algorithms = found["algorithms"]
    if not algorithms or len(set(algorithms)) < len(algorithms):
        raise InputError("'algorithms' takes one or more different names")
    return Study(name=name, points=_points(table["points"]), settings=tuple(found.pop("set", ())), **found)


def _points(given: Any) -> dict[str, list[str]]:
    if not isinstance(given, list) or not given:
        raise InputError("'points' takes one or more tables [[points]]")
    found: dict[str, list[str]] = {}
    for point in given:
        if not isinstance(point, Mapping) or set(point) != {"label", "set"}:
            raise InputError("a point has the keys label and set, and no other")
        label = check(point["label"], str, "label")
        if label in found:
            raise InputError(f"two points have the label '{label}'")
        found[label] = check(point["set"], list[str], "set")
    return found
