"""``mixfed tune``: equally many trials for each method, never scored on test data, and the way back to ``run``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments import tune as tuning
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.scores import best_of_last, score
from mixfed.experiments.tune import Trial

from .tools import TINY, here, refused

RECIPE = """
rounds = 4
cohort = 3
[data]
source = "digits"
[data.partition]
kind = "iid"
clients = 10
[data.central]
kind = "test"
examples = 200
[model]
name = "mlp"
hidden = [8]
[client]
learning_rate = 0.1
batch_size = 10
steps = 3
[central]
steps = 3
[evaluate]
every = 1
[simulator]
executor = "loop"
[for.fed_ft.central]
learning_rate = 0.05
[tune.fed_ft.central]
learning_rate = [1e-6, 0.2, 0.1]
steps = [1, 4]
[tune.fedprox.algorithms.fedprox]
mu = [0.01, 1000.0]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(RECIPE)
    return file


def test_each_method_tries_equally_many_points_and_what_is_chosen_is_taken_back(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuning"
    command = ["tune", recipe, "--algorithms", "fedprox,fed_ft", "--on", "centre", "--last", "2", "--seeds", "0,1"]
    command += ["--set", "data.central.validation=0.25", "--out", out]
    here(*command)
    found = json.loads((out / "tuning.json").read_text())
    assert (found["trials"], found["metric"], found["best_of_last"]) == (2, "accuracy", 2)
    assert found["algorithms"]["fedprox"]["grid"] == {"algorithms.fedprox.mu": [0.01, 1000.0]}
    for name, entry in found["algorithms"].items():
        assert len(entry["trials"]) == 2
        for i, trial in enumerate(entry["trials"]):
            folders = [RunFolder(out / f"{name}-{i}-seed{seed}") for seed in (0, 1)]
            assert {f.stored().evaluate.on for f in folders} == {"centre"}
            assert trial["values"] == [max(line["accuracy"] for line in f.history()[-2:]) for f in folders]
            assert trial["mean"] == pytest.approx(np.mean(trial["values"]))
        assert entry["best"]["score"] == max(trial["mean"] for trial in entry["trials"])
    # A client that is pulled back with μ = 1000 and a rate of 0.1 goes astray.
    assert found["algorithms"]["fedprox"]["best"]["settings"] == {"algorithms.fedprox.mu": 0.01}

    chosen = found["algorithms"]["fed_ft"]["best"]["settings"]
    tuned = ["--tuned", out / "tuned.toml"]
    here("run", recipe, "--algorithm", "fed_ft", *tuned, "--out", tmp_path / "run")
    again = RunFolder(tmp_path / "run").stored()
    assert again.central.learning_rate == chosen["central.learning_rate"]
    assert again.central.steps == chosen["central.steps"]
    assert again.evaluate.on == "test"
    here("compare", recipe, "--algorithms", "fed_ft", *tuned, "--set", "central.steps=2", "--out", tmp_path / "cmp")
    assert RunFolder(tmp_path / "cmp" / "fed_ft-seed0").stored().central.steps == 2

    results = sorted(out.glob("*/result.json"))
    written = [file.stat().st_mtime_ns for file in results]
    here(*command)  # finished runs are taken as they are
    assert [file.stat().st_mtime_ns for file in results] == written
    assert json.loads((out / "tuning.json").read_text()) == found


def test_a_method_that_diverges_is_not_chosen(recipe: Path, tmp_path: Path) -> None:
    options = ["--set", "data.validation=0.2", "--metric", "loss", "--out", tmp_path / "out"]
    here("tune", recipe, "--algorithms", "fedavg", "--grid", "fedavg:client.learning_rate=1e38,0.1", *options)
    entry = json.loads((tmp_path / "out" / "tuning.json").read_text())["algorithms"]["fedavg"]
    assert entry["trials"][0]["mean"] is None
    assert entry["best"]["settings"] == {"client.learning_rate": 0.1}


def test_what_cannot_be_tuned_is_refused_in_a_sentence(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune = ["tune", recipe, "--algorithms", "fed_ft", *TINY]
    assert "never on test data" in refused(capsys, *tune, "--on", "test")
    assert "--on" in refused(capsys, *tune, "--set", "evaluate.on=test")
    assert "no validation part" in refused(capsys, *tune, "--out", tmp_path / "a")
    assert "set data.central.validation to a share above 0" in refused(
        capsys, *tune, "--on", "centre", "--out", tmp_path / "b"
    )
    assert "sets it to one value" in refused(capsys, *tune, "--set", "central.steps=2")
    assert "cannot be 7" in refused(capsys, *tune, "--trials", "7")
    assert "not a setting of a method" in refused(capsys, *tune, "--grid", "data.validation=0.1,0.2")
    assert "key=value" in refused(capsys, *tune, "--grid", "central.steps")
    assert "not one of fed_ft" in refused(capsys, *tune, "--grid", "hfcl:central.steps=1,2")
    assert "central.epochs" in refused(capsys, *tune, "--grid", "central.epoch=1,2")
    assert "nothing to try for hfcl" in refused(capsys, "tune", recipe, "--algorithms", "hfcl")
    assert "did you mean 'hfcl'" in refused(capsys, "tune", recipe, "--algorithms", "hfcll")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("rounds = 3\n")
    run = ["run", recipe, "--out", tmp_path / "c", "--tuned"]
    assert "[for.ALGORITHM" in refused(capsys, *run, wrong)
    assert "cannot be read" in refused(capsys, *run, tmp_path / "none.toml")


def test_the_centre_keeps_examples_apart_to_tune_on(recipe: Path) -> None:
    table = toml.load(str(recipe))
    whole = build_scenario(toml.resolve(table))
    apart = build_scenario(toml.resolve(toml.override(table, ["data.central.validation=0.25"])))
    assert whole.central is not None
    assert apart.central is not None
    assert apart.of_centre is not None
    assert (len(apart.central), len(apart.of_centre)) == (150, 50)
    together = np.concatenate([apart.central.arrays["x"], apart.of_centre.arrays["x"]])
    assert np.array_equal(np.sort(together, axis=0), np.sort(whole.central.arrays["x"], axis=0))
    assert np.array_equal(apart.test.arrays["x"], whole.test.arrays["x"])
    with pytest.raises(InputError, match="holds none"):
        build_scenario(toml.resolve(toml.override(table, ["data.central.kind=none", "data.central.validation=0.25"])))


def test_grids_are_the_recipes_and_the_commands() -> None:
    table = {"tune": {"fed_ft": {"central": {"steps": [1, 2]}}}}
    given = ["client.optimizer=sgd,adam", "hfcl:central.steps=3,4,5", "model.hidden=[8],[16,8]"]
    found = tuning.grids(table, ["fed_ft", "hfcl"], given)
    common = {"client.optimizer": ["sgd", "adam"], "model.hidden": [[8], [16, 8]]}
    assert found == {"fed_ft": {"central.steps": [1, 2], **common}, "hfcl": {"central.steps": [3, 4, 5], **common}}
    points = tuning.drawn(found)
    assert {name: len(p) for name, p in points.items()} == {"fed_ft": 8, "hfcl": 8}
    assert all(p in tuning.points(found["hfcl"]) for p in points["hfcl"])
    assert len({json.dumps(p) for p in points["hfcl"]}) == 8
    assert tuning.drawn(found, 3) == tuning.drawn(found, 3)


def test_the_best_is_the_largest_accuracy_or_the_smallest_loss() -> None:
    trials = [Trial({"a": 1}, [0.5, 0.7]), Trial({"a": 2}, [0.9, None]), Trial({"a": 3}, [0.6, 0.8])]
    assert [t.score for t in trials] == [0.6, None, pytest.approx(0.7)]
    assert tuning.best(trials, "accuracy") is trials[2]
    assert tuning.best(trials, "loss") is trials[0]
    assert tuning.best(trials[1:2], "loss") is None
    history = [{"round": r, "loss": x} for r, x in enumerate([0.1, 0.5, None, 0.4])]
    assert best_of_last(history, "loss", 3) == 0.4
    assert best_of_last(history, "loss", 9) == 0.1
    assert best_of_last(history[2:3], "loss", 2) is None
    assert best_of_last([{"round": 1, "loss": 0.4}, {"round": 2, "loss": math.nan}], "loss", 2) == 0.4
    assert tuning.at_edge({"a": [1, 2, 3], "b": [1, 2]}, {"a": 3, "b": 2}) == ["a"]
    assert tuning.at_edge({"a": [1, 2, 3]}, {"a": 2}) == []


@pytest.mark.parametrize("end", [None, math.nan, math.inf])
def test_a_run_that_ends_without_a_loss_has_no_score(end: float | None) -> None:
    good = {"round": 1, "loss": 0.4, "recall@10": 0.3}
    assert score([good, good | {"recall@10": 0.2}], "recall@10", 2) == 0.3
    assert score([good, {"round": 2, "loss": end, "recall@10": 1.0}], "recall@10", 2) is None
    assert score([good, {"round": 2, "loss": 0.1, "recall@10": end}], "recall@10", 2) is None


def test_tuned_settings_lie_over_the_recipes_own(recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text("[for.fed_ft.central]\nlearning_rate = 0.3\n")
    given = Request(str(recipe), [], tuned=file)
    assert given.on(given.base(), algorithm="fed_ft").central.learning_rate == 0.3
    assert Request(str(recipe), []).on(given.base(), algorithm="fed_ft").central.learning_rate == 0.05
    assert given.on(given.base(), algorithm="hfcl").central.learning_rate == 0.1
