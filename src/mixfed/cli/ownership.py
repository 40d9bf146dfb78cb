"""``mixfed data``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from mixfed.cli.console import stdout
from mixfed.data.scenario import Scenario
from mixfed.experiments.ownership import Holding, holdings
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.ownership import plot_holdings
from mixfed.experiments.report.plot import require_format
from mixfed.experiments.scenario import build_scenario

MOST_LABELS = 20


def show(recipe: Recipe, plot: Path | None) -> None:
    """Prints who holds what, and draws it."""
    if plot is not None:
        require_format(plot)
    scenario = build_scenario(recipe)
    stdout.print(holdings_table(recipe.name, scenario))
    if plot is not None:
        plot_holdings(scenario.clients, plot, scenario.central, names=scenario.source.names.get("y"))
        stdout.print(f"Picture: {plot}", soft_wrap=True)


def holdings_table(name: str, scenario: Scenario) -> Table:
    """A row per holder: how many examples, of which labels."""
    table = Table(title=f"{name}: who holds what")
    for column in ("", "examples", "labels"):
        table.add_column(column, justify="right" if column == "examples" else "left")
    (clients, together), *others = holdings(scenario).items()
    sizes = scenario.clients.sizes()
    table.add_row(clients, f"{together.examples:,}", _labels(together))
    table.add_row(
        "  each: smallest, median, largest",
        f"{sizes.min():,} · {np.median(sizes):,.0f} · {sizes.max():,}",
        "",
    )
    for holder, holding in others:
        table.add_row(holder, f"{holding.examples:,}", _labels(holding))
    return table


def _labels(holding: Holding) -> str:
    if len(holding.labels) > MOST_LABELS:
        return f"{len(holding.labels)} different ones"
    return ", ".join(f"{name} ({count:,})" for name, count in holding.labels.items())
