"""``mixfed compare``."""

from __future__ import annotations

import json
from pathlib import Path

from mixfed.cli.common import say_that_it_begins
from mixfed.cli.console import stdout
from mixfed.cli.watching import watching
from mixfed.experiments.compare import compare, mixed
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.files import folder_for
from mixfed.experiments.report.probe import prediction_words
from mixfed.experiments.report.tables import comparison_tables


def execute(recipes: list[Recipe], out: Path | None, *, resume: bool, probe: bool, to_json: bool) -> None:
    """Runs all of them, and prints what came of it beside what a short probe predicted."""
    out = folder_for(out, f"{recipes[0].name}-compare")
    if resume and not any(out.glob("*/config.toml")):
        say_that_it_begins(out, "none of these runs, so they begin")
    with watching() as watch:
        found = compare(recipes, out, resume=resume, probe=probe, watch=watch)
    for table in comparison_tables(recipes[0], found):
        stdout.print(table)
    if "probe" in found:
        stdout.print(prediction_words(found["probe"], found["algorithms"], mixed(found)), soft_wrap=True)
    stdout.print(f"Comparison: {out / 'comparison.json'}\nPlot: {out / 'comparison.png'}", soft_wrap=True)
    stdout.print(f"Report: {out / 'report.html'}", soft_wrap=True)
    if to_json:
        print(json.dumps(found))
