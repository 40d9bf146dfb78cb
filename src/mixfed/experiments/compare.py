"""Several algorithms with several seeds on one recipe, and what came of it.

::

    ALGORITHM-seedN/    the folder of each run
    comparison.json     every metric's mean, spread and values by algorithm, and the mean ledger
    comparison.png      the metrics over rounds
    report.html         all of it, to look at
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mixfed.errors import InputError, RunStopped
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.probing import predict
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.files import write_json
from mixfed.experiments.report.plot import plot_comparison
from mixfed.experiments.reporting import report
from mixfed.experiments.runs import take_up, train_all
from mixfed.experiments.scores import spread_of
from mixfed.experiments.watch import UNWATCHED, Watch

MIXED = ("parallel", "gradient_1way", "gradient_2way")
"""Algorithms of which the probe predicts how they compare."""
Key = tuple[str, int]
"""A run: the algorithm and the seed."""


def compare(
    recipes: Sequence[Recipe],
    out: str | Path,
    *,
    resume: bool = False,
    probe: bool = False,
    watch: Watch = UNWATCHED,
) -> dict[str, Any]:
    """Trains every recipe (they differ in algorithm and seed) in a folder under ``out``, and sums up.

    With ``resume`` runs of the same recipes that are there go on, and finished ones are taken as they are. A run that
    stops because it diverges has no figures. With ``probe``, what a short probe predicts of mixed methods is part of
    the comparison if there are several of them.
    """
    out, runs = Path(out), {(recipe.algorithm, recipe.seed): recipe for recipe in recipes}
    if not runs or len(runs) < len(recipes):
        raise InputError("A comparison is of one or more recipes that differ in algorithm or seed.")
    folders = _folders(runs, out, resume)
    results = train_all(runs, folders, watch)
    if not any(results.values()):
        raise RunStopped("Every run of the comparison stopped before its end; lower the learning rates.")
    first = recipes[0]
    found = compare_results(_by_algorithm(results))
    if probe and "parallel" in found["algorithms"] and len(mixed(found)) > 1:
        found["probe"] = predict(first, watch)
    write_json(out / "comparison.json", found)
    curves = _by_algorithm({key: folder.history() for key, folder in folders.items()})
    plot_comparison(out / "comparison.png", first.title or first.name, curves)
    report([out])
    return found


def compare_results(results: Mapping[str, Sequence[Mapping[str, Any] | None]]) -> dict[str, Any]:
    """What comparison.json holds: for every algorithm, each metric's mean, spread and values, and the mean ledger.

    A run that stopped (None) has no figures, so that the mean of those with other seeds is none either.
    """
    return {"algorithms": {name: _summary(runs) for name, runs in results.items()}}


def mixed(comparison: Mapping[str, Any]) -> list[str]:
    """The compared algorithms of which the probe predicts something."""
    return [name for name in comparison["algorithms"] if name in MIXED]


def _summary(runs: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    ended = [run for run in runs if run is not None]
    names = ended[0]["metrics"] if ended else ()
    metrics = {name: spread_of([run["metrics"].get(name) if run else None for run in runs]) for name in names}
    costs = ended[0]["ledger"] if ended else ()
    ledger = {name: round(float(np.mean([run["ledger"][name] for run in ended]))) for name in costs}
    return {"metrics": metrics, "ledger": ledger}


def _by_algorithm(found: Mapping[Key, Any]) -> dict[str, list[Any]]:
    by_name: dict[str, list[Any]] = {}
    for (name, _), item in found.items():
        by_name.setdefault(name, []).append(item)
    return by_name


def _folders(recipes: Mapping[Key, Recipe], out: Path, resume: bool) -> dict[Key, RunFolder]:
    """The folders of the runs; refuses to write over other runs."""

    def name(key: Key) -> str:
        return f"{key[0]}-seed{key[1]}"

    unopened = {key: RunFolder(out / name(key)) for key in recipes}
    if not resume and (out / "comparison.json").exists():
        raise InputError(f"{out} already holds a comparison; go on with --resume, or choose another folder with --out.")
    for folder in unopened.values():
        if not (resume and folder.config.exists()):
            folder.require_unused()
    return take_up(recipes, out, name)
