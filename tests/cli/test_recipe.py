"""Recipes: every key typed, every default filled in, every mistake named."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from mixfed.algorithms.registry import ALGORITHMS
from mixfed.errors import InputError
from mixfed.experiments import study as studies
from mixfed.experiments import toml
from mixfed.experiments.build import build
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.texts import packaged


@pytest.mark.parametrize("name", packaged("recipes"))
def test_packaged_recipes_are_complete_and_come_back_from_toml(name: str) -> None:
    recipe = toml.resolve(toml.load(name))
    assert recipe.title
    assert recipe.name == name
    assert toml.resolve(tomllib.loads(recipe.toml())) == recipe


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_can_be_built_from_a_recipe_with_its_options_written_out(algorithm: str) -> None:
    recipe = toml.resolve(toml.override(toml.load("digits"), [f"algorithm={algorithm}"]))
    again = toml.resolve(tomllib.loads(recipe.toml()))
    assert again == recipe
    assert build(again).algorithm.name


def test_settings_are_toml_values_or_else_text() -> None:
    table = toml.override(
        toml.load("digits"),
        ["rounds=7", "client.learning_rate=1", "model.hidden=[8, 4]", "client.nesterov=true", "client.momentum=0.9",
         "title=two words", 'paper="quoted = text"', "algorithms.fedprox.mu=0.5", "published.fedavg.accuracy=0.4"],
    )  # fmt: skip
    recipe = toml.resolve(table)
    assert recipe.rounds == 7
    assert recipe.client.learning_rate == 1.0
    assert isinstance(recipe.client.learning_rate, float)
    assert recipe.client.options["momentum"] == 0.9
    assert recipe.client.options["nesterov"] is True
    assert recipe.model.options["hidden"] == [8, 4]
    assert (recipe.title, recipe.paper) == ("two words", "quoted = text")
    assert recipe.algorithms["fedprox"] == {"mu": 0.5}
    assert recipe.published == {"fedavg": {"accuracy": 0.4}}


def test_another_choice_takes_its_former_options_along() -> None:
    table = toml.override(toml.load("digits"), ["client.momentum=0.9", "client.weight_decay=0.1"])
    recipe = toml.resolve(toml.override(table, ["client.optimizer=adam", "model.name=linear"]))
    assert "momentum" not in recipe.client.options
    assert recipe.client.options["weight_decay"] == 0.1
    assert recipe.client.options["betas"] == [0.9, 0.999]
    assert "hidden" not in recipe.model.options
    with pytest.raises(InputError, match="momentum"):
        toml.resolve(toml.override(table, ["client.optimizer=adam", "client.momentum=0.5"]))


def test_a_user_s_own_recipe_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("rounds = 3\n[client]\nsteps = 1\n[data.partition]\nclients = 5\n")
    recipe = toml.resolve(toml.load(str(file)))
    assert (recipe.name, recipe.rounds, recipe.data.source) == ("mine", 3, "digits")


def test_the_test_and_validation_examples_are_the_same_for_every_seed() -> None:
    settings = ["data.validation=0.25"]
    table = toml.load("digits")
    one, two = (build_scenario(toml.resolve(toml.override(table, [*settings, f"seed={seed}"]))) for seed in (0, 1))
    assert one.validation is not None
    assert two.validation is not None
    assert np.array_equal(one.test.arrays["x"], two.test.arrays["x"])
    assert np.array_equal(one.validation.arrays["x"], two.validation.arrays["x"])
    assert not np.array_equal(one.clients.arrays["x"], two.clients.arrays["x"])
    assert one.central is not None
    assert one.clients.examples + len(one.central) + len(one.validation) == 1438


def write_faces(folder: Path, people: int = 30, each: int = 6) -> None:
    """A small file in the format of the faces source; a person's pictures are all of the person's number."""
    identity = np.repeat(np.arange(people), each)
    smile = np.tile(np.arange(each) % 2, people)
    x = np.repeat(identity, 32 * 32).reshape(-1, 32, 32).astype(np.uint8) + smile[:, None, None].astype(np.uint8) * 100
    np.savez(folder / "faces_smile_32.npz", x=x, smile=smile, identity=identity)


def test_smile_holds_people_out_and_groups_the_others(tmp_path: Path) -> None:
    write_faces(tmp_path)
    settings = [f"data.folder={tmp_path}", "data.validation=0.25", "cohort=4"]
    scenario = build_scenario(toml.resolve(toml.override(toml.load("smile"), settings)))
    assert scenario.central is not None
    assert scenario.validation is not None

    def people(arrays: dict[str, np.ndarray]) -> set[int]:
        return {int(v) for v in np.unique(arrays["x"][:, 0, 0, 0] - 100 * arrays["y"])}

    assert set(scenario.clients.arrays["y"]) == {1}
    assert set(scenario.central.arrays["y"]) == {0}
    held, validation = people(scenario.test.arrays), people(scenario.validation.arrays)
    assert (len(held), len(validation)) == (6, 6)
    trained = people(scenario.clients.arrays) | people(scenario.central.arrays)
    assert not held & trained
    assert not held & validation
    assert not validation & trained
    assert len(scenario.clients) == 6  # eighteen people in groups of three
    assert all(len(people(scenario.clients.client(c))) == 3 for c in range(6))
    assert set(scenario.test.arrays["y"]) == {0, 1}


def test_a_recipe_can_change_another_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "digits"\nrounds = 7\n[model]\nname = "linear"\n[published.fedavg]\naccuracy = 0.5\n')
    mine, digits = toml.resolve(toml.load(str(file))), toml.resolve(toml.load("digits"))
    assert (mine.name, mine.rounds, mine.model.name) == ("mine", 7, "linear")
    assert "hidden" not in mine.model.options
    assert (mine.data, mine.client, mine.title) == (digits.data, digits.client, digits.title)
    quick = toml.resolve(toml.load("feddle-fashion-quick"))
    assert not quick.published
    assert not quick.paper
    second = tmp_path / "second.toml"
    second.write_text(f"base = '{file}'\nrounds = 8\n")
    assert toml.resolve(toml.load(str(second))).model == mine.model
    assert not toml.load(str(second)).get("published")
    file.write_text(f"base = '{second}'\n")
    with pytest.raises(InputError, match="cannot be the base of itself"):
        toml.load(str(file))


def test_every_packaged_study_has_settings_that_its_recipe_takes() -> None:
    for name in packaged("studies"):
        study = studies.load(name)
        table = toml.load(study.recipe)
        for settings in study.points.values():
            given = Request(study.recipe, [*study.settings, *settings])
            assert given.on(table, algorithm=study.algorithms[-1]).rounds
