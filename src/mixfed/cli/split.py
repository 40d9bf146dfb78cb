"""``mixfed split`` and ``mixfed run --split-search``: which layers of a model should be global."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.table import Table

from mixfed.cli.console import stderr, stdout
from mixfed.errors import InputError
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.request import Request
from mixfed.experiments.split import best_of_both, search


def execute(recipe: Recipe, *, to_json: bool) -> None:
    """Tries every split and shows accuracy on validation data against parameters sent."""
    found = list(search(recipe, say=lambda text: stderr.print(f"Trying {text} …", style="dim")))
    table = Table(title=f"{recipe.name} · which layers are global · validation data · seed {recipe.seed}")
    for heading in ("global layers", "parameters", "parameters sent", "accuracy local", "accuracy new", ""):
        table.add_column(heading, justify="right")
    best = best_of_both(found)
    for split in found:
        mark = "best of both" if split is best else ""
        name = f"{split.side} {split.layers}" if split.layers else "none"
        table.add_row(name, f"{split.parameters:,}", f"{split.sent:,}", f"{split.local:.3f}", f"{split.new:.3f}", mark)
    stdout.print(table)
    if to_json:
        print(json.dumps([asdict(split) for split in found]))


def in_place_of_run(request: Request, *, to_json: bool, **options: Any) -> None:
    """The same search; options of a run that it cannot heed are refused."""
    algorithm = request.options.get("algorithm", "lg_fedavg")
    if algorithm != "lg_fedavg":
        raise InputError(f"--split-search splits the model of lg_fedavg and does not go with --algorithm {algorithm}.")
    for name, value in options.items():
        if value:
            raise InputError(f"--split-search tries many runs and keeps none, so it does not go with --{name}.")
    execute(request.on(request.base()), to_json=to_json)
