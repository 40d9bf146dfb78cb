"""``mixfed advise``: what is tried, ruled out and advised, and what it never looks at."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mixfed as mf
from mixfed.experiments.advise.look import look_at, with_validation
from mixfed.experiments.advise.trials import Field, Trial, first_rounds
from mixfed.experiments.report.probe import predicted_right
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario

from .tools import TINY, last_json, mixfed, refused


def test_digits_of_which_half_are_at_the_centre(tmp_path: Path) -> None:
    """The methods that mix learn all ten digits; those of clients or centre alone, and Feddle, cannot."""
    command = ["advise", "digits", "--rounds", "16", *TINY, "--executor", "loop", "--minutes", "0.4", "--json"]
    done = mixfed(*command, "--out", tmp_path / "out")
    found = last_json(done)
    assert set(found) == {"advice", "ruled_out"}
    assert 1 <= len(found["advice"]) <= 3
    mixing = {"parallel", "example_transfer", "gradient_1way", "gradient_2way", "fed_ft"}
    assert {entry["algorithm"] for entry in found["advice"]} <= mixing
    assert all(set(entry) == {"algorithm", "settings", "why"} for entry in found["advice"])
    assert "only the centre has" in found["ruled_out"]["feddle"]
    assert "never sees the labels 5, 6, 7, 8, 9" in found["ruled_out"]["fedavg"]
    assert "nobody is late" in found["ruled_out"]["fedbuff"]
    written = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert written["advice"] == found["advice"]
    assert f"mixfed run digits --algorithm {found['advice'][0]['algorithm']}" in " ".join(done.stdout.split())


def test_objects_of_ones_own() -> None:
    """Clients hold the left half of the plane and the centre the right one; the test set is never looked at."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(600, 2)).astype(np.float32)
    y = (x[:, 1] > 0).astype(np.int64)
    left = x[:, 0] < 0
    clients = mf.FederatedData.from_arrays({"x": x[left], "y": y[left]}, np.arange(left.sum()) % 8)
    test = {"x": np.full((20, 2), 1e6, np.float32), "y": np.zeros(20, np.int64)}
    torch.manual_seed(0)
    task = mf.Task(
        nn.Linear(2, 2), clients, test, centre={"x": x[~left], "y": y[~left]}, rounds=8, cohort=4,
        client={"steps": 2}, central={"steps": 2},
    )  # fmt: skip
    found = mf.advise(task, minutes=0.05, progress=False)
    assert found.metric == "accuracy"
    assert found.trials[0]["accuracy"] is None or 0.5 <= found.trials[0]["accuracy"] <= 1
    assert "accuracy" in found.advice[0]["why"]
    assert any("The features of clients and centre are very unlike" in sentence for sentence in found.look)


def test_what_is_seen_and_kept_apart() -> None:
    request = Request("digits")
    recipe = request.on(request.base())
    scenario = build_scenario(recipe)
    look = look_at(recipe, scenario)
    assert (look.only_centre, look.only_clients) == ([5, 6, 7, 8, 9], [0, 1, 2, 3, 4])
    assert not look.late
    apart = with_validation(scenario, 0)
    assert apart.validation is not None
    assert apart.central is not None
    assert scenario.central is not None
    trained = apart.clients.examples + len(apart.central)
    assert trained + len(apart.validation) == scenario.clients.examples + len(scenario.central)
    assert apart.own["validation"].examples + len(scenario.central) - len(apart.central) == len(apart.validation)


def test_a_trial_stops_at_its_evaluation_and_goes_on_from_there(tmp_path: Path) -> None:
    request = Request("lg-digits", rounds=16)
    recipe = request.on(request.base(), **{"evaluate.on": "validation", "evaluate.every": 4, "algorithm": "local"})
    field = Field(
        partial(with_validation, build_scenario(recipe)), "accuracy_local", time.monotonic() + 60, tmp_path, str
    )
    trial = Trial(recipe, {})
    field.go_on(trial, 4, 60)
    assert (trial.rounds, list(trial.scores)) == (4, [4])
    field.go_on(trial, 8, 60)
    assert (trial.rounds, list(trial.scores), trial.why_not) == (8, [4, 8], "")


def test_how_long_methods_are_tried_at_first() -> None:
    assert first_rounds(1e-4, 10, 100, 60) == 100
    assert first_rounds(1.0, 10, 100, 1500) == 24
    assert first_rounds(100.0, 10, 100, 60) == 12


@pytest.mark.parametrize(
    ("unlike", "parallel", "transfer", "right"),
    [(True, 0.5, 0.4, True), (True, 0.4, 0.5, False), (False, 0.5, 0.52, True), (False, 0.5, 0.2, False)],
)
def test_the_verdict(unlike: bool, parallel: float, transfer: float, right: bool) -> None:
    assert predicted_right(unlike, {"parallel": parallel, "gradient_2way": transfer}) is right
    assert predicted_right(unlike, {"parallel": parallel, "gradient_2way": None}) is None


def test_what_cannot_be_advised(capsys: pytest.CaptureFixture[str]) -> None:
    assert "some minutes" in refused(capsys, "advise", "digits", "--minutes", "0")
    assert "have no metric 'auc'" in refused(capsys, "advise", "digits", "--metric", "auc")
