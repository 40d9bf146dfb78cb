"""``mixfed probe``: is Parallel Training enough?"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from mixfed.cli.common import progress
from mixfed.cli.console import stdout
from mixfed.experiments.probing import probe, write_probe
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.bars import begun_on
from mixfed.experiments.report.files import folder_for
from mixfed.experiments.report.probe import probe_table, probe_words
from mixfed.experiments.watch import Watch


def execute(recipe: Recipe, rounds: int, repeats: int, out: Path | None, *, to_json: bool) -> None:
    """Measures, prints, plots and advises."""
    out = folder_for(out, f"{recipe.name}-probe")
    with progress() as bar:
        found, advice = probe(recipe, rounds, repeats, Watch(partial(begun_on, bar)))
    result = write_probe(out, recipe, found, advice)
    stdout.print(probe_table(found))
    stdout.print(probe_words(advice), soft_wrap=True)
    stdout.print(f"Probe: {out / 'probe.json'}\nPlot: {out / 'probe.png'}", soft_wrap=True)
    if to_json:
        print(json.dumps(result))
