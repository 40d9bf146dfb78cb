"""``mixfed tune``: each method's own settings, chosen on data that is not the test's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w
from rich.table import Table

from mixfed.cli.common import Given, Interrupts, progress, stdout, words
from mixfed.cli.compare import numbers_of, train_in
from mixfed.core.files import write_atomically
from mixfed.errors import InputError, RunStopped
from mixfed.experiments import tune as tuning
from mixfed.experiments.dealing import build_scenario
from mixfed.experiments.folder import RunFolder, folder_for
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.comparison import spread_of
from mixfed.experiments.report.tables import mean_and_spread
from mixfed.experiments.tune import Trial

Key = tuple[str, int, int]
"""A run: the algorithm, the number of its trial, the seed."""


def execute(
    given: Given,
    algorithms: str,
    grid: list[str],
    seeds: str,
    out: Path | None,
    *,
    trials: int | None,
    on: str,
    metric: str | None,
    last: int,
    to_json: bool,
) -> None:
    """Tries equally many points of every algorithm's grid (finished runs in the folder are taken as they are)."""
    names, numbers, base = words(algorithms, "--algorithms"), numbers_of(seeds), given.base()
    grids = tuning.grids(base, names, grid)
    _refuse(given, on, last, grids)
    points = tuning.drawn(grids, trials)
    scored_on = {"evaluate.on": on} | ({"evaluate.sets": ["all"]} if on == "centre" else {})
    recipes: dict[Key, Recipe] = {}
    for seed in numbers:
        for name, settings in points.items():
            for i, point in enumerate(settings):
                table = tuning.with_settings(base, name, point)
                recipes[name, i, seed] = given.on(table, algorithm=name, seed=seed, **scored_on)
    first = next(iter(recipes.values()))
    metric = metric or ("accuracy" if "accuracy" in first.evaluate.metrics else first.evaluate.metrics[0])
    out = folder_for(out, f"{first.name}-tune")
    scores = _train_all(recipes, out, metric, last)
    tried = {
        name: [Trial(point, [scores[name, i, seed] for seed in numbers]) for i, point in enumerate(settings)]
        for name, settings in points.items()
    }
    found = {
        **{"recipe": first.name, "on": on, "metric": metric, "best_of_last": last, "seeds": numbers},
        **{"rounds": first.rounds, "trials": len(next(iter(points.values())))},
        "algorithms": {name: _summary(grids[name], runs, metric) for name, runs in tried.items()},
    }
    write_atomically(out / "tuning.json", (json.dumps(found, indent=2) + "\n").encode())
    write_atomically(out / "tuned.toml", _tuned(found).encode())
    stdout.print(_table(found))
    stdout.print(f"Tuning: {out / 'tuning.json'}\nFor run and compare: --tuned {out / 'tuned.toml'}", soft_wrap=True)
    if to_json:
        print(json.dumps(found))


def _refuse(given: Given, on: str, last: int, grids: dict[str, tuning.Grid]) -> None:
    if on not in ("validation", "centre"):
        raise InputError(f"Settings are chosen on validation or centre, never on test data, so not on '{on}'.")
    if last < 1:
        raise InputError(f"A score is the best of the last 1 or more evaluations, not of {last}.")
    fixed = {setting.partition("=")[0].strip() for setting in given.settings} | set(given.options)
    if "evaluate.on" in fixed:
        raise InputError("What tune scores on is said with --on, not with --set evaluate.on.")
    for name, grid in grids.items():
        for key in grid:
            if key in fixed:
                raise InputError(f"'{key}' of {name} is to be tuned, and the command sets it to one value.")


def _train_all(recipes: dict[Key, Recipe], out: Path, metric: str, last: int) -> dict[Key, float | None]:
    """The score of every run, seed by seed so that a seed's data are dealt once."""
    scores: dict[Key, float | None] = {}
    dealt: tuple[Any, Any] = (None, None)
    with Interrupts() as interrupts, progress() as bar:
        for (name, i, seed), recipe in recipes.items():
            folder = RunFolder(out / f"{name}-{i}-seed{seed}")
            if folder.config.exists():
                folder.adopt(recipe)
            if folder.finished() is None:
                if dealt[0] != (seed, recipe.data):
                    dealt = ((seed, recipe.data), build_scenario(recipe))
                try:
                    train_in(recipe, dealt[1], folder, interrupts, bar)
                except RunStopped:
                    scores[name, i, seed] = None
                    continue
            scores[name, i, seed] = tuning.score(folder.history(), metric, last)
    return scores


def _summary(grid: tuning.Grid, trials: list[Trial], metric: str) -> dict[str, Any]:
    best = tuning.best(trials, metric)
    return {
        "grid": grid,
        "trials": [{"settings": t.settings, **spread_of(t.scores)} for t in trials],
        "best": None if best is None else {"settings": best.settings, "score": best.score},
        "at_edge": [] if best is None else tuning.at_edge(grid, best.settings),
    }


def _tuned(found: dict[str, Any]) -> str:
    """The chosen settings as TOML that ``--tuned`` takes."""
    table: dict[str, Any] = {"for": {}}
    for name, entry in found["algorithms"].items():
        if entry["best"]:
            table = tuning.with_settings(table, name, entry["best"]["settings"])
    told = f"{found['metric']} on {found['on']} data, {found['trials']} trials each, recipe {found['recipe']}"
    return f"# Chosen by mixfed tune: {told}.\n{tomli_w.dumps(table)}"


def _table(found: dict[str, Any]) -> Table:
    title = f"{found['recipe']} · {found['metric']} on {found['on']} data, best of the last {found['best_of_last']}"
    table = Table(title=title, title_justify="left")
    for heading in ("algorithm", "settings", found["metric"], ""):
        table.add_column(heading, justify="right" if heading == found["metric"] else "left")
    for name, entry in found["algorithms"].items():
        best = entry["best"] and entry["best"]["settings"]
        for i, trial in enumerate(entry["trials"]):
            told = "\n".join(f"{_short(key, name)} = {value}" for key, value in trial["settings"].items())
            mark = ""
            if trial["settings"] == best:
                edges = [_short(key, name) for key in entry["at_edge"]]
                edge = f" (at the edge: {', '.join(edges)})" if edges else ""
                mark = f"best{edge}"
            score = "diverges" if trial["mean"] is None else mean_and_spread(trial)
            table.add_row(name if i == 0 else "", told, score, mark)
        table.add_section()
    return table


def _short(key: str, algorithm: str) -> str:
    return key.removeprefix(f"algorithms.{algorithm}.")
