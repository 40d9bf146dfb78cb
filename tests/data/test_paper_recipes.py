"""The recipes have the papers' settings, and settings for one algorithm hold for that one only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mixfed.core.schedule import sample_cohort
from mixfed.errors import InputError
from mixfed.experiments import tune as tuning
from mixfed.experiments.build import build_schedule
from mixfed.experiments.networks import build_model
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.toml import chosen as chosen_for
from mixfed.experiments.toml import load, override, resolve
from mixfed.models import MODELS
from tests.tiny_sources import write_chat_wiki

RATES = {
    "client": {"learning_rate": 2.0, "steps": 1},
    "central": {"steps": 1},
    "data": {"partition": {"clients": 10}, "central": {"kind": "fraction", "fraction": 0.5}},
    "for": {"gradient_2way": {"client": {"learning_rate": 1.0}}},
}


def recipe_of(name: str, algorithm: str) -> Recipe:
    return resolve(override(load(name), [f"algorithm={algorithm}"]))


@pytest.mark.parametrize("algorithm", ["fedavg", "parallel", "gradient_1way", "gradient_2way", "oracle"])
def test_language_has_the_settings_of_tables_8_and_9(algorithm: str) -> None:
    recipe = recipe_of("language-paper", algorithm)
    rate = 1.0 if algorithm == "gradient_2way" else 2.0
    assert (recipe.cohort, recipe.client.batch_size, recipe.client.steps) == (100, 8, 16)
    assert recipe.client.learning_rate == recipe.central.learning_rate == rate
    assert (recipe.server.learning_rate, recipe.merge.learning_rate) == (1.0, 1.0)
    assert (recipe.central.batch_size, recipe.central.steps) == (800, 16)
    assert recipe.algorithms["gradient_1way"] == {"central_batch_size": 6400}
    assert (recipe.mixing.w_f, recipe.mixing.w_c) == (0.73, 0.27)
    assert recipe.data.options["length"] == 100


@pytest.mark.parametrize("algorithm", ["fedavg", "parallel", "gradient_1way", "gradient_2way", "oracle"])
def test_smile_has_the_settings_of_tables_6_and_7(algorithm: str) -> None:
    recipe = recipe_of("smile-celeba", algorithm)
    assert (recipe.cohort, recipe.client.batch_size, recipe.client.steps) == (100, 5, 2)
    assert recipe.client.learning_rate == recipe.central.learning_rate == 0.01
    assert (recipe.server.learning_rate, recipe.merge.learning_rate) == (1.0, 1.0)
    assert (recipe.central.batch_size, recipe.central.steps) == (500, 2)
    assert recipe.algorithms["gradient_1way"] == {"central_batch_size": 1000}
    assert (recipe.mixing.w_f, recipe.mixing.w_c) == (0.5, 0.5)


@pytest.mark.parametrize("size", ["", "-quick"])
@pytest.mark.parametrize("name", ["feddle-fashion", "feddle-cifar10", "feddle-cifar100"])
def test_feddle_has_the_settings_of_sections_5_and_d(name: str, size: str) -> None:
    recipe = recipe_of(name + size, "feddle")
    assert (recipe.cohort, recipe.rounds, recipe.schedule.delay) == (10, 200, "half_normal")
    assert (recipe.data.partition.kind, recipe.schedule.options["sd"]) == ("dirichlet", 20.0)
    assert recipe.data.partition.options == {"clients": 500, "alpha": 0.1, "min_size": 1}
    assert (recipe.data.central.kind, recipe.data.central.examples) == ("test", 1000)
    assert (recipe.evaluate.every, recipe.evaluate.best_of_last) == (10, 5)
    assert recipe.algorithms["feddle"]["atlas"] == 2 * recipe.cohort
    assert recipe.data.partition.by == ("fine" if "100" in name else "y")
    assert bool(recipe.published) == (not size)


@pytest.mark.parametrize("size", ["", "-quick"])
@pytest.mark.parametrize(("name", "other"), [("fashion", "cifar10"), ("cifar10", "fashion-mnist")])
def test_feddle_out_of_domain_has_the_other_source_at_the_centre(name: str, other: str, size: str) -> None:
    recipe = recipe_of(f"feddle-{name}-ood{size}", "feddle")
    assert (recipe.data.central.kind, recipe.data.central.source) == ("other", other)
    assert recipe.algorithms["feddle"]["objective"] == "out_of_domain"
    assert (recipe.central.epochs, recipe.data.source) == (0, recipe_of(f"feddle-{name}", "feddle").data.source)


def test_messages_to_late_clients_fit_the_memory_or_are_elsewhere() -> None:
    """Of a ResNet-18, for as many rounds as have somebody in flight at the paper's larger delay."""
    recipe = recipe_of("feddle-cifar100-resnet", "feddle")
    schedule, waiting, most = build_schedule(recipe), np.zeros((0, 2)), 0
    for number in range(recipe.rounds):
        asked = sample_cohort(0, number, "clients", 500, recipe.cohort)
        reports = number + schedule.delays(0, number, "clients", asked)
        waiting = np.concatenate([waiting, np.stack([reports, np.full(len(asked), number)], 1)])
        waiting = waiting[waiting[:, 0] >= number + 1]
        most = max(most, len(np.unique(waiting[:, 1])))
    size = 4 * sum(p.numel() for p in MODELS["resnet18"](outputs=20).parameters())
    assert (most + 3 * recipe.cohort) * size > recipe.simulator.memory  # a client that runs takes three models
    assert recipe.simulator.in_flight == "disk"


@pytest.mark.parametrize("name", ["feddle-fashion-quick", "feddle-fashion-cnn-quick"])
def test_what_was_chosen_is_a_point_of_the_grid(name: str) -> None:
    table = load(name)
    grids = tuning.grids(table, ["center", "fed_ft", "hfcl", "feddle"])
    assert {len(tuning.points(grid)) for grid in grids.values()} == {4 if "cnn" in name else 6}
    for algorithm, grid in grids.items():
        chosen = chosen_for(table, algorithm)
        for key, values in grid.items():
            here = chosen
            for part in key.split("."):
                here = here[part]
            assert here in values


@pytest.mark.parametrize(("name", "embedding", "hidden"), [("language", 32, 64), ("language-paper", 256, 1024)])
def test_language_models_have_the_size_that_is_said(tmp_path: Path, name: str, embedding: int, hidden: int) -> None:
    write_chat_wiki(tmp_path)
    settings = [f"data.folder={tmp_path}", "data.min_messages=2", "data.length=10", "data.held_out=0.25"]
    recipe = resolve(override(load(name), settings))
    params = build_model(recipe, build_scenario(recipe)).initial()
    gru = 3 * hidden * (embedding + hidden + 2)
    assert sum(x.numel() for x in params.values()) == 97 * embedding + gru + 97 * (hidden + 1)


def test_settings_for_one_algorithm() -> None:
    assert resolve(RATES).client.learning_rate == 2.0
    special = resolve(RATES | {"algorithm": "gradient_2way"})
    assert special.client.learning_rate == 1.0
    assert "for" not in special.table()
    assert resolve(special.table()).table() == special.table()


def test_the_command_line_has_the_last_word() -> None:
    assert Request("digits", []).on(RATES, algorithm="gradient_2way").client.learning_rate == 1.0
    assert Request("digits", ["algorithm=gradient_2way"]).on(RATES).client.learning_rate == 1.0
    given = Request("digits", ["client.learning_rate=0.5"])
    assert given.on(RATES, algorithm="gradient_2way").client.learning_rate == 0.5
    assert given.on(RATES).client.learning_rate == 0.5


def test_settings_for_one_algorithm_are_checked() -> None:
    with pytest.raises(InputError, match="no algorithm 'gradient_3way'"):
        resolve({"for": {"gradient_3way": {"rounds": 1}}})
    with pytest.raises(InputError, match=r"no setting 'client.rate'"):
        resolve({"for": {"fedavg": {"client": {"rate": 1}}}})
    with pytest.raises(InputError, match="'for' takes a table of settings, not 3"):
        resolve({"for": 3})
