"""Tables fit a terminal of 80 columns, whatever they show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from mixfed.experiments import toml
from mixfed.experiments.report.tables import COSTS, comparison_tables

METRICS = ["loss", "accuracy", "auc", "accuracy_clients", "loss_local"]


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("published", [{}, {"example_transfer": dict.fromkeys(METRICS, 0.9)}], ids=["here", "paper"])
def test_a_comparison_fits_80_columns_and_shows_every_figure(seeds: int, published: dict) -> None:
    recipe = replace(toml.resolve(toml.load("digits")), published=published)
    metrics = {m: {"mean": 10.5 + i, "spread": 0.25, "values": [0.0] * seeds} for i, m in enumerate(METRICS)}
    ledger = dict.fromkeys((*COSTS, "bytes_once"), 1.25e12)
    entry = {"metrics": metrics, "ledger": ledger}
    console = Console(width=200, record=True)
    for table in comparison_tables(recipe, {"algorithms": {"example_transfer": entry}}):
        console.print(table)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for i in range(len(METRICS)):
        assert f"{10.5 + i:.3f}" + (" ± 0.250" if seeds > 1 else "") in text
    assert text.count("0.900") == (len(METRICS) if published else 0)
