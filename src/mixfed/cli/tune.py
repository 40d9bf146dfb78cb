"""``mixfed tune``: each method's own settings, chosen on data that is not the test's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from mixfed.cli.common import numbers_of, words
from mixfed.cli.console import stdout
from mixfed.cli.watching import watching
from mixfed.experiments.report.tables import mean_and_spread
from mixfed.experiments.request import Request
from mixfed.experiments.tune import tune


def execute(
    request: Request,
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
    """Tries equally many points of every algorithm's grid, and prints what was chosen."""
    names, numbers = words(algorithms, "--algorithms"), numbers_of(seeds)
    with watching() as watch:
        found, out = tune(
            request, names, grid, numbers, out, trials=trials, on=on, metric=metric, last=last, watch=watch
        )
    stdout.print(_table(found))
    stdout.print(f"Tuning: {out / 'tuning.json'}\nFor run and compare: --tuned {out / 'tuned.toml'}", soft_wrap=True)
    if to_json:
        print(json.dumps(found))


def _table(found: Mapping[str, Any]) -> Table:
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
