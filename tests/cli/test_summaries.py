"""Summaries say what was run: what would be counted twice, dropped or called divergence by mistake is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixfed.experiments import toml
from mixfed.experiments.build import build
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.scores import metric_names

from .tools import TINY, refused

STUDY = """
title = "Two rates"
recipe = "digits"
algorithms = ["fedavg"]
metric = "{metric}"
{settings}

[[points]]
label = "small"
set = ["client.learning_rate=0.1"]

[[points]]
label = "{second}"
set = ["client.learning_rate=0.2"]
"""


def study(folder: Path, metric: str = "accuracy", second: str = "large", settings: str = "") -> Path:
    file = folder / "rates.toml"
    file.write_text(STUDY.format(metric=metric, second=second, settings=settings))
    return file


def test_a_misspelt_metric_is_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "study", study(tmp_path, metric="acuracy"), *TINY, "--out", tmp_path / "out")
    assert "no metric 'acuracy'; they have loss, accuracy" in told
    tune = ["tune", "digits", "--algorithms", "fedavg", "--grid", "client.steps=1,2", "--set", "data.validation=0.2"]
    assert "no metric 'acuracy'" in refused(capsys, *tune, *TINY, "--metric", "acuracy", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_chosen_by_a_number_for_each_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_class = ["--set", "evaluate.metrics=['class_accuracy']", "--set", "data.validation=0.2", *TINY]
    tune = ["tune", "digits", "--algorithms", "fedavg", "--grid", "client.steps=1,2", "--out", tmp_path / "out"]
    for command in (tune, ["advise", "digits"], ["run", "digits", "--set", "stop.metric=class_accuracy"]):
        assert "a choice is made by one number" in refused(capsys, *command, *by_class)


def test_two_points_of_one_label_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "two points have the label 'small'" in refused(capsys, "study", study(tmp_path, second="small"))


@pytest.mark.parametrize("seeds", ["01,1", "1,1", "-0,0", "1_0,10"])
def test_a_seed_counts_once(seeds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "digits", "--algorithms", "fedavg", "--seeds", seeds, "--out", tmp_path / "out"]
    assert "different" in refused(capsys, *command)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ("for.fedavg.client.learning_rate=0.1,0.2", "is not a setting of a method"),
        ("tune.fedavg.client.learning_rate=0.1,0.2", "is not a setting of a method"),
        ("published.fedavg.accuracy=0.1,0.2", "is not a setting of a method"),
        ("client.learning_rate=0.1,0.10", "Trials 0 and 1 of fedavg would train alike"),
        ("algorithms.fedprox.mu=0.1,0.2", "Trials 0 and 1 of fedavg would train alike"),
    ],
)
def test_trials_that_train_alike_are_refused(
    grid: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = ["tune", "digits", "--algorithms", "fedavg", "--set", "data.validation=0.2", *TINY, "--grid", grid]
    assert told in refused(capsys, *tune, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def digits(*settings: str) -> Recipe:
    return toml.resolve(toml.override(toml.load("digits"), ["simulator.executor=loop", *settings]))


@pytest.mark.parametrize(
    "settings",
    [
        ["evaluate.sets=['all', 'clients', 'centre', 'new', 'averaged']"],
        ["evaluate.sets=['local', 'all']", "data.own_test=0.3", "algorithm=local"],
        ["evaluate.sets=['centre']", "evaluate.metrics=['accuracy']"],
    ],
)
def test_the_names_of_metrics_are_those_that_a_run_has(settings: list[str]) -> None:
    recipe = digits("rounds=1", "cohort=2", "data.partition.clients=10", *settings)
    assert sorted(metric_names(recipe)) == sorted(build(recipe).run().metrics)
