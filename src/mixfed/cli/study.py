"""``mixfed study``: one recipe at several settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from mixfed.cli.common import numbers_of
from mixfed.cli.console import stdout
from mixfed.cli.watching import watching
from mixfed.experiments.report.files import folder_for
from mixfed.experiments.report.tables import mean_and_spread
from mixfed.experiments.request import Request
from mixfed.experiments.study import Study, run_study


def execute(request: Request, study: Study, seeds: str, out: Path | None, *, to_json: bool) -> None:
    """Runs every point with every algorithm and seed, and prints what came of it."""
    out = folder_for(out, f"study-{study.name}")
    with watching() as watch:
        found = run_study(request, study, numbers_of(seeds), out, watch)
    stdout.print(_table(study, found["points"]))
    stdout.print(f"Study: {out / 'study.json'}\nPlot: {out / 'study.png'}", soft_wrap=True)
    if to_json:
        print(json.dumps(found))


def _table(study: Study, summary: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title=f"{study.title} · {study.metric}", title_justify="left")
    table.add_column("")
    for name in study.algorithms:
        table.add_column(name, justify="right", no_wrap=True)
    for point, by_name in summary.items():
        cells = [mean_and_spread(by_name[n]) if not by_name[n]["diverged"] else "diverges" for n in study.algorithms]
        table.add_row(point, *cells)
    return table
