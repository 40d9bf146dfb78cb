"""``mixfed study``: one recipe at several settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from mixfed.cli.common import Given, Interrupts, progress, stdout
from mixfed.cli.compare import numbers_of, train_in
from mixfed.core.files import write_atomically
from mixfed.errors import RunStopped
from mixfed.experiments.dealing import build_scenario
from mixfed.experiments.folder import RunFolder, folder_for
from mixfed.experiments.report.comparison import spread_of
from mixfed.experiments.report.plot import plot_study
from mixfed.experiments.report.tables import mean_and_spread
from mixfed.experiments.study import Study

Found = dict[str, dict[str, list[dict[str, Any] | None]]]
"""By point and algorithm: the result of every seed, None where the run diverged."""


def execute(given: Given, study: Study, seeds: str, out: Path | None, *, to_json: bool) -> None:
    """Runs every point with every algorithm and seed (finished runs in the folder are taken as they are)."""
    out = folder_for(out, f"study-{study.name}")
    found = _train_all(given, study, numbers_of(seeds), out)
    summary = {
        point: {name: _summary(study, runs) for name, runs in by_name.items()} for point, by_name in found.items()
    }
    result = {"study": study.name, "metric": study.metric, "points": summary}
    write_atomically(out / "study.json", (json.dumps(result, indent=2) + "\n").encode())
    plot_study(out / "study.png", study.title, study.metric, summary)
    stdout.print(_table(study, summary))
    stdout.print(f"Study: {out / 'study.json'}\nPlot: {out / 'study.png'}", soft_wrap=True)
    if to_json:
        print(json.dumps(result))


def _train_all(given: Given, study: Study, seeds: list[int], out: Path) -> Found:
    found: Found = {point: {name: [] for name in study.algorithms} for point in study.points}
    base = given.base()
    with Interrupts() as interrupts, progress() as bar:
        for seed in seeds:
            for number, (point, settings) in enumerate(study.points.items()):
                at = given.with_settings([*study.settings, *settings])
                for name in study.algorithms:
                    recipe = at.on(base, algorithm=name, seed=seed)
                    folder = RunFolder(out / f"{number}-{name}-seed{seed}")
                    if folder.config.exists():
                        folder.adopt(recipe)
                    result = folder.finished()
                    if result is None:
                        try:
                            result = train_in(recipe, build_scenario(recipe), folder, interrupts, bar)
                        except RunStopped:
                            result = None
                    found[point][name].append(result)
    return found


def _summary(study: Study, runs: list[dict[str, Any] | None]) -> dict[str, Any]:
    values = [None if run is None else run["metrics"].get(study.metric) for run in runs]
    return {**spread_of(values), "diverged": sum(value is None for value in values)}


def _table(study: Study, summary: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{study.title} · {study.metric}", title_justify="left")
    table.add_column("")
    for name in study.algorithms:
        table.add_column(name, justify="right", no_wrap=True)
    for point, by_name in summary.items():
        cells = [mean_and_spread(by_name[n]) if not by_name[n]["diverged"] else "diverges" for n in study.algorithms]
        table.add_row(point, *cells)
    return table
