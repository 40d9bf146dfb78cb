"""``mixfed probe`` and ``mixfed study``: what they print and write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_sources import write_movielens

from .tools import TINY, last_json, mixfed, refused

STUDY = """
title = "Two rates"
recipe = "digits"
algorithms = ["parallel", "gradient_2way"]
metric = "accuracy"

[[points]]
label = "sensible"
set = ["client.learning_rate=0.1"]

[[points]]
label = "absurd"
set = ["client.learning_rate=1e18", "central.learning_rate=1e18"]
"""


def test_the_probe_measures_and_advises(tmp_path: Path) -> None:
    out = tmp_path / "probe"
    done = mixfed("probe", "digits", "--rounds", "4", "--repeats", "2", *TINY, "--out", out, "--json")
    found = last_json(done)
    assert found == json.loads((out / "probe.json").read_text())
    assert found["max"]["G2"] >= found["median"]["G2"] > 0
    assert found["advice"]["algorithm"] in ("parallel", "gradient_1way", "gradient_2way")
    assert "estimate" in done.stdout
    assert not found["advice"]["convex"]
    assert (out / "probe.png").read_bytes().startswith(b"\x89PNG")


def test_a_linear_model_is_advised_by_the_convex_rows(tmp_path: Path) -> None:
    linear = ["--set", "model.name=linear", "--rounds", "2", "--repeats", "1", "--out", tmp_path / "probe", "--json"]
    done = mixfed("probe", "digits", *linear)
    assert last_json(done)["advice"]["convex"]
    assert "(convex)" in done.stdout


def test_the_probe_needs_a_centre(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no central data" in refused(capsys, "probe", "digits", "--set", "data.central.kind=none")


def test_the_probe_of_a_regulariser(tmp_path: Path) -> None:
    write_movielens(tmp_path, "ml-100k/u.data", "\t")
    people = ["--set", "data.held_out=0.2", "--set", "data.validation=0.0", "--set", "cohort=2"]
    command = ["probe", "movies-100k", "--data", tmp_path, *people, "--rounds", "3", "--repeats", "1"]
    for algorithm in ("parallel", "fedavg"):  # which would have the regulariser on clients
        done = mixfed(*command, "--set", f"algorithm={algorithm}", "--out", tmp_path / algorithm, "--json")
        found = last_json(done)
        assert found["max"]["G2"] > 0 == found["max"]["sigma_c2"]
        assert "needs no data" in done.stdout


def test_a_comparison_of_mixed_methods_has_a_prediction(tmp_path: Path) -> None:
    command = ["compare", "digits", "--algorithms", "parallel,gradient_1way", "--rounds", "2", *TINY]
    done = mixfed(*command, "--out", tmp_path / "a", "--json")
    assert "Predicted by a short probe" in done.stdout
    assert "Verdict: predicted " in done.stdout
    assert last_json(done)["probe"]["max"]["G2"] > 0
    assert "probe" not in last_json(mixfed(*command, "--no-probe", "--out", tmp_path / "b", "--json"))


def test_a_study_compares_settings_and_shows_what_diverges(tmp_path: Path) -> None:
    file = tmp_path / "rates.toml"
    file.write_text(STUDY)
    command = ["study", file, "--rounds", "4", *TINY, "--out", tmp_path / "out", "--json"]
    done = mixfed(*command)
    points = last_json(done)["points"]
    assert points["sensible"]["parallel"]["mean"] > 0
    assert points["sensible"]["parallel"]["diverged"] == 0
    assert points["absurd"]["gradient_2way"] == {"mean": None, "spread": None, "values": [None], "diverged": 1}
    assert "diverges" in done.stdout
    assert (tmp_path / "out" / "study.png").exists()
    assert last_json(mixfed(*command))["points"]["sensible"] == points["sensible"]


def test_a_study_may_be_made_on_another_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, recipe = tmp_path / "rates.toml", tmp_path / "mine.toml"
    file.write_text(STUDY)
    recipe.write_text('base = "digits"\ntitle = "My own"\n')
    command = ["study", file, "--recipe", recipe, "--rounds", "1", *TINY, "--out", tmp_path / "out", "--json"]
    assert last_json(mixfed(*command))["study"] == "rates-mine"
    configs = list((tmp_path / "out").glob("*/config.toml"))
    assert configs
    assert all('title = "My own"' in config.read_text() for config in configs)
    assert "no recipe" in refused(capsys, "study", file, "--recipe", "digit")


def test_studies_that_do_not_exist_or_are_malformed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'smile-central-batch'" in refused(capsys, "study", "smile-central-bach")
    file = tmp_path / "half.toml"
    file.write_text('title = "no points"\n')
    assert "not well formed" in refused(capsys, "study", file)
