"""``mixfed run`` of a recipe with a theory: closed form and measurement side by side."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from mixfed.cli.common import stdout
from mixfed.core.files import write_atomically
from mixfed.errors import InputError
from mixfed.experiments.folder import folder_for
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.theory import Linear, curves, plot


def execute(recipe: Recipe, out: Path | None, as_json: bool) -> None:
    """Measures every setting and writes ``theory.json`` and ``theory.png``."""
    section, out = recipe.theory, folder_for(out, recipe.name)
    if section.alphas < 2 or section.seeds < 1:
        raise InputError("A curve takes at least 2 values of alpha and 1 seed.")
    if (out / "theory.json").exists():
        raise InputError(f"{out} already holds this theory; choose another folder with --out.")
    alphas = [i / (section.alphas - 1) for i in range(section.alphas)]
    settings = [
        Linear(section.sigma, rho, section.dimension, section.devices, section.examples, section.test)
        for rho in section.rho
    ]
    found = curves(settings, alphas, range(recipe.seed, recipe.seed + section.seeds))
    told = []
    for setting, closed, measured in found:
        mean = measured.mean(axis=0)
        table = Table(title=f"σ = {setting.sigma}, ρ = {setting.rho}: least at α* = {setting.best:.3f}")
        for heading in ("α", "closed form", "measured", "ratio"):
            table.add_column(heading, justify="right")
        for a, c, m in zip(alphas, closed, mean, strict=True):
            table.add_row(f"{a:.2f}", f"{c:.5f}", f"{m:.5f}", f"{m / c:.3f}" if c else "–")
        stdout.print(table)
        told.append({"rho": setting.rho, "best": setting.best, "closed": closed.tolist(), "measured": mean.tolist()})
    write_atomically(out / "theory.json", (json.dumps({"alphas": alphas, "settings": told}, indent=2) + "\n").encode())
    plot(found, alphas, out / "theory.png")
    stdout.print(f"Curves: {out / 'theory.json'}\nPlot: {out / 'theory.png'}", soft_wrap=True)
    if as_json:
        print(json.dumps({"alphas": alphas, "settings": told}))
