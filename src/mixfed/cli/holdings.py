"""``mixfed data``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from mixfed.cli.common import Given, stdout
from mixfed.data.scenario import Scenario
from mixfed.data.store import CentralData, FederatedData
from mixfed.experiments.dealing import build_scenario

MOST_LABELS = 20


def show(given: Given, plot: Path | None) -> None:
    """Prints who holds what, and draws it."""
    recipe = given.on(given.base())
    scenario = build_scenario(recipe)
    stdout.print(holdings_table(recipe.name, scenario))
    if plot is not None:
        from mixfed.experiments.report.holdings import plot_holdings

        plot_holdings(scenario.clients, plot, scenario.central, names=scenario.source.names.get("y"))
        stdout.print(f"Picture: {plot}", soft_wrap=True)


def holdings_table(name: str, scenario: Scenario) -> Table:
    """A row per holder: how many examples, of which labels."""
    words = scenario.source.names.get("y", ())
    table = Table(title=f"{name}: who holds what")
    for column in ("", "examples", "labels"):
        table.add_column(column, justify="right" if column == "examples" else "left")
    clients = scenario.clients
    table.add_row(f"{len(clients):,} clients", f"{clients.examples:,}", _labels(clients, words))
    sizes = clients.sizes()
    table.add_row(
        "  each: smallest, median, largest",
        f"{sizes.min():,} · {np.median(sizes):,.0f} · {sizes.max():,}",
        "",
    )
    holders = {
        **{"centre": scenario.central, "centre, kept apart to tune on": scenario.of_centre},
        **{"validation": scenario.validation, "test": scenario.test},
    }
    for holder, data in holders.items():
        if data is not None:
            table.add_row(holder, f"{len(data):,}", _labels(data, words))
    return table


def _labels(data: FederatedData | CentralData, words: tuple[str, ...]) -> str:
    values, counts = np.unique(data.arrays["y"], return_counts=True)
    if len(values) > MOST_LABELS:
        return f"{len(values)} different ones"
    named = [words[int(v)] if 0 <= v < len(words) else str(v) for v in values]
    return ", ".join(f"{name} ({count:,})" for name, count in zip(named, counts, strict=True))
