"""Is Parallel Training enough? The probe of a recipe, and its short form as a prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.evaluate.probe.advice import Advice, advise, as_json
from mixfed.evaluate.probe.dissimilarity import Dissimilarity, measure_dissimilarity
from mixfed.experiments.build import build_setup
from mixfed.experiments.networks import build_model
from mixfed.experiments.recipe import Recipe, Training
from mixfed.experiments.report.files import write_json
from mixfed.experiments.report.probe import plot_probe
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.watch import UNWATCHED, Interrupted, Watch


def probe(
    recipe: Recipe, rounds: int = 100, repeats: int = 5, watch: Watch = UNWATCHED
) -> tuple[Dissimilarity, Advice]:
    """The measurements for a recipe and the advice that follows from them."""
    scenario = build_scenario(recipe)
    if scenario.central is None and recipe.regulariser.name == "none":
        raise InputError(
            f"The recipe '{recipe.name}' has no central data, so there is nothing to mix and to probe; give the centre"
            " some with data.central.kind."
        )
    if min(recipe.mixing.w_f, recipe.mixing.w_c) <= 0:
        raise InputError("The probe compares two losses; both weights (mixing.w_f and mixing.w_c) must be above 0.")
    recipe = replace(recipe, algorithm="parallel")  # which mixes: a regulariser is the centre's, not the clients'
    setup = build_setup(recipe, scenario, build_model(recipe, scenario))
    total, done = rounds * repeats, 0
    moved = watch.begin("probe", total)

    def advance() -> None:
        nonlocal done
        done += 1
        moved(done, {})
        if watch.should_stop():
            raise Interrupted(f"{done} of {total} rounds of the probe")

    found = measure_dissimilarity(
        setup,
        scenario.clients,
        scenario.central,
        cohort=recipe.cohort,
        rounds=rounds,
        first_round=min(10, rounds // 2),
        repeats=repeats,
        seed=recipe.seed,
        progress=advance,
    )
    advice = advise(
        found,
        cohort=recipe.cohort,
        steps=local_steps(recipe.client, scenario.clients),
        server_rate=recipe.server.learning_rate,
        central_examples=0 if scenario.central is None else len(scenario.central),
        convex=recipe.regulariser.name == "none" and is_linear(setup.client.model.module()),
    )
    return found, advice


def is_linear(module: nn.Module) -> bool:
    """Whether a network is one linear layer, so that cross-entropy and squared errors are convex in its parameters."""
    layers = [part for part in module.modules() if not list(part.children())]
    return len([part for part in layers if list(part.parameters())]) == 1 and all(
        isinstance(part, nn.Linear | nn.Flatten | nn.Identity) for part in layers
    )


def local_steps(how: Training, clients: FederatedData) -> int:
    """K: the steps of a client in a round; where it trains by epochs, those of the median client."""
    if how.steps:
        return how.steps
    per_epoch = -(-clients.sizes() // how.batch_size) if how.batch_size else np.ones(1)
    return int(np.median(per_epoch)) * how.epochs


def predict(recipe: Recipe, watch: Watch = UNWATCHED) -> dict[str, Any]:
    """What a short probe (30 rounds, once) says of a recipe, for a comparison to be held against."""
    return as_json(*probe(recipe, rounds=30, repeats=1, watch=watch))


def write_probe(out: Path, recipe: Recipe, found: Dissimilarity, advice: Advice) -> dict[str, Any]:
    """Writes ``probe.json``, which is returned, and ``probe.png``."""
    result = as_json(found, advice)
    write_json(out / "probe.json", result)
    plot_probe(out / "probe.png", recipe.title or recipe.name, found)
    return result
