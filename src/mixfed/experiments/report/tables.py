"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from mixfed.experiments.recipe import Recipe

ROOM = 60
"""Characters that a table's metrics may take, so that it fits a terminal of 80."""
COSTS = ("bytes_down", "bytes_up", "client_flops", "server_flops", "bytes_kept")


def run_table(recipe: Recipe, result: Mapping[str, Any]) -> Table:
    """What a run reached and what it cost, with the paper's figures where there are some."""
    paper = recipe.published.get(recipe.algorithm, {})
    table = Table(title=f"{recipe.name} · {result['rounds']} rounds · seed {result['seed']}")
    table.add_column(recipe.algorithm)
    table.add_column("here", justify="right")
    if paper:
        table.add_column("paper", justify="right")
    for name, value in result["metrics"].items():
        table.add_row(name, figure(value), *([figure(paper.get(name))] if paper else []))
    table.add_section()
    for name, value in result["ledger"].items():
        table.add_row(name.replace("_", " "), amount(name, value))
    table.add_row("seconds", f"{result['seconds']:.1f}")
    return table


def comparison_tables(recipe: Recipe, comparison: Mapping[str, Any]) -> list[Table]:
    """A row per algorithm: mean ± spread of every metric beside the paper's figure, then what each cost."""
    algorithms = comparison["algorithms"]
    metrics = list(dict.fromkeys(name for entry in algorithms.values() for name in entry["metrics"]))
    wide = any(len(found["values"]) > 1 for entry in algorithms.values() for found in entry["metrics"].values())
    known = {name for figures in recipe.published.values() for name in figures}
    columns = max(1, ROOM // ((16 if wide else 9) + (8 if known & set(metrics) else 0)))
    title = f"{recipe.name} · {recipe.rounds} rounds"
    tables = [
        _metrics_table(title, algorithms, metrics[i : i + columns], recipe.published)
        for i in range(0, len(metrics), columns)
    ]
    costs = Table(title="what it cost", title_justify="left")
    costs.add_column("algorithm", no_wrap=True)
    once = ["bytes_once"] if any(entry["ledger"].get("bytes_once") for entry in algorithms.values()) else []
    shown = [*COSTS[:2], *once, *COSTS[2:]]
    for name in shown:
        costs.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for algorithm, entry in algorithms.items():
        costs.add_row(algorithm, *(amount(name, entry["ledger"].get(name)) for name in shown))
    return [*tables, costs]


def _metrics_table(
    title: str, algorithms: Mapping[str, Any], metrics: Sequence[str], published: Mapping[str, Mapping[str, float]]
) -> Table:
    known = [m for m in metrics if any(m in published.get(name, {}) for name in algorithms)]
    table = Table(title=title, title_justify="left")
    table.add_column("algorithm", no_wrap=True)
    for name in metrics:
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
        if name in known:
            table.add_column("paper", justify="right", no_wrap=True, style="dim")
    for algorithm, entry in algorithms.items():
        cells = []
        for name in metrics:
            cells.append(mean_and_spread(entry["metrics"].get(name)))
            if name in known:
                cells.append(figure(published.get(algorithm, {}).get(name)))
        table.add_row(algorithm, *cells)
    return table


def figure(value: float | None) -> str:
    """A metric, to three places."""
    return "–" if value is None else f"{value:.3f}"


def mean_and_spread(found: Mapping[str, Any] | None) -> str:
    """mean ± spread; the spread only where there is more than one run."""
    if found is None or found["mean"] is None:
        return "–"
    return f"{found['mean']:.3f}" + (f" ± {found['spread']:.3f}" if len(found["values"]) > 1 else "")


def amount(name: str, value: float | None) -> str:
    """A cost in readable units: bytes in kB, MB …, FLOPs in M, G …, examples in full."""
    if value is None:
        return "–"
    unit = "B" if name.startswith("bytes") else "" if name.endswith("flops") else None
    if unit is None:
        return f"{value:,.0f}"
    if not value:
        return "0"
    size, prefixes = float(value), ["", "k", "M", "G", "T", "P"]
    while size >= 1000 and len(prefixes) > 1:
        size /= 1000
        del prefixes[0]
    return f"{size:.3g} {prefixes[0]}{unit}".rstrip()
