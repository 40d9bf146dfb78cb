"""``mixfed run`` of a recipe with a theory: closed form and measurement side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from mixfed.cli.console import stdout
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.files import folder_for
from mixfed.experiments.theory import Curve, as_json, theory


def execute(recipe: Recipe, out: Path | None, to_json: bool) -> None:
    """Measures every setting, and prints a table for each."""
    out = folder_for(out, recipe.name)
    alphas, found = theory(recipe, out)
    for curve in found:
        stdout.print(_table(alphas, curve))
    stdout.print(f"Curves: {out / 'theory.json'}\nPlot: {out / 'theory.png'}", soft_wrap=True)
    if to_json:
        print(json.dumps(as_json(alphas, found)))


def _table(alphas: Sequence[float], curve: Curve) -> Table:
    setting, closed, measured = curve
    table = Table(title=f"σ = {setting.sigma}, ρ = {setting.rho}: least at α* = {setting.best:.3f}")
    for heading in ("α", "closed form", "measured", "ratio"):
        table.add_column(heading, justify="right")
    for a, c, m in zip(alphas, closed, measured.mean(axis=0), strict=True):
        table.add_row(f"{a:.2f}", f"{c:.5f}", f"{m:.5f}", f"{m / c:.3f}" if c else "–")
    return table
