"""``mixfed probe``: is Parallel Training enough?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from mixfed.cli.common import Given, progress, stdout
from mixfed.core.files import write_atomically
from mixfed.data.scenario import Scenario
from mixfed.errors import InputError
from mixfed.evaluate.probe.advice import Advice, advise, as_json
from mixfed.evaluate.probe.dissimilarity import Dissimilarity, measure_dissimilarity
from mixfed.experiments.build import build_model, build_setup
from mixfed.experiments.dealing import build_scenario
from mixfed.experiments.folder import folder_for
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.probe import plot_probe, probe_table, probe_words


def execute(given: Given, rounds: int, repeats: int, out: Path | None, *, to_json: bool) -> None:
    """Measures, prints, plots and advises."""
    recipe = given.on(given.base())
    out = folder_for(out, f"{recipe.name}-probe")
    found, advice = probe(recipe, build_scenario(recipe), rounds, repeats)
    result = as_json(found, advice)
    write_atomically(out / "probe.json", (json.dumps(result, indent=2) + "\n").encode())
    plot_probe(out / "probe.png", recipe.title or recipe.name, found)
    stdout.print(probe_table(found))
    stdout.print(probe_words(advice), soft_wrap=True)
    stdout.print(f"Probe: {out / 'probe.json'}\nPlot: {out / 'probe.png'}", soft_wrap=True)
    if to_json:
        print(json.dumps(result))


def probe(recipe: Recipe, scenario: Scenario, rounds: int, repeats: int) -> tuple[Dissimilarity, Advice]:
    """The measurements for a recipe and the advice that follows from them."""
    if scenario.central is None and recipe.regulariser.name == "none":
        raise InputError(f"The recipe '{recipe.name}' has no central data, so there is nothing to mix and to probe.")
    recipe = replace(recipe, algorithm="parallel")  # which mixes: a regulariser is the centre's, not the clients'
    setup = build_setup(recipe, scenario, build_model(recipe, scenario))
    with progress() as bar:
        task = bar.add_task("probe", total=rounds * repeats, told="")
        found = measure_dissimilarity(
            setup,
            scenario.clients,
            scenario.central,
            cohort=recipe.cohort,
            rounds=rounds,
            first_round=min(10, rounds // 2),
            repeats=repeats,
            seed=recipe.seed,
            progress=lambda: bar.advance(task),
        )
    advice = advise(
        found,
        cohort=recipe.cohort,
        steps=recipe.client.steps or 1,
        server_rate=recipe.server.learning_rate,
        central_examples=0 if scenario.central is None else len(scenario.central),
    )
    return found, advice


def predict(recipe: Recipe) -> dict[str, Any]:
    """What a short probe (30 rounds, once) says of a recipe, for a comparison to be held against."""
    return as_json(*probe(recipe, build_scenario(recipe), rounds=30, repeats=1))
