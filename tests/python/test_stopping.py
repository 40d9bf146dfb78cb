"""Rules that end a run early: what they see, that a resumed run ends alike, and the best model on validation data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mixfed
from mixfed.core.loop import Record
from mixfed.core.stopping import Stopping, best_round
from tests.cli.tools import TINY, here, refused
from tests.problems import blobs
from tests.python.test_task import SETTINGS, network


def record(values: list[float], *, seconds: float = 0.0, sent: int = 0, evaluated: bool = True) -> Record:
    """The record of the last of these evaluations, one every second round."""
    history = [{"round": 2 * (i + 1), "accuracy": value} for i, value in enumerate(values)]
    metrics = {"accuracy": values[-1]} if evaluated else {}
    ledger = {"bytes_down": sent - sent // 3, "bytes_up": sent // 3}
    return Record(2 * len(values), 100, metrics, ledger, 0, {}, history=history, seconds=seconds)


def test_each_rule_ends_a_run_where_it_says() -> None:
    by_metric = Stopping("accuracy", patience=2)
    assert by_metric(record([0.5, 0.7, 0.6])) is None
    assert by_metric(record([0.5, 0.7, 0.6, 0.7])) == "The accuracy was best in round 4, 2 evaluations ago."
    assert by_metric(record([float("nan")] * 9)) is None  # a run that is broken is not ended as a good one
    assert Stopping("accuracy", 2, smaller_is_better=True)(record([0.5, 0.7, 0.6])) is not None
    assert Stopping(minutes=0.5)(record([0.1], seconds=29.9)) is None
    assert Stopping(minutes=0.5)(record([0.1], seconds=30.0)) == "0.5 minutes are over."
    assert Stopping(bytes=1000)(record([0.1], sent=999)) is None
    assert Stopping(bytes=1000)(record([0.1], sent=1200)) == "1,200 bytes were sent, and 1,000 were allowed."
    assert Stopping(bytes=1000)(record([0.1], sent=1200, evaluated=False)) is None
    assert best_round([], "accuracy", smaller=False) is None
    with pytest.raises(mixfed.InputError, match="patience"):
        Stopping(patience=0)


def stopped_task(**more: Any) -> mixfed.Task:
    clients, centre, test = blobs(clients=12)
    settings = SETTINGS | {"rounds": 40, "evaluate": {"every": 1}, "stop": {"metric": "loss", "patience": 2}} | more
    settings["client"] = SETTINGS["client"] | {"learning_rate": 2.0}  # too large: the loss does not fall for long
    return mixfed.Task(network(), clients, test, centre=centre, validation=test, **settings)


def test_no_progress_on_validation_data_ends_a_run_and_the_best_is_kept(tmp_path: Path) -> None:
    result = mixfed.train(stopped_task(), "oracle", out=tmp_path / "run", progress=False)
    assert result.finished
    assert 3 <= result.rounds < 40
    assert "loss_validation was best in round" in result.ended
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    losses = {entry["round"]: entry["loss_validation"] for entry in result.history}
    assert written["best"]["loss_validation"] == min(losses.values())
    assert written["ended"] == result.ended
    best = mixfed.load(tmp_path / "run", network=network(), best=True)
    found = dict(best.state_dict())
    assert all(torch.equal(found[n], x) for n, x in load_file(tmp_path / "run" / "best.safetensors").items())
    again = mixfed.score(replace(result, params=found), blobs(clients=12)[2], ["loss"])
    assert again["loss"] == pytest.approx(min(losses.values()), rel=1e-5)


def test_a_resumed_run_ends_in_the_same_round(tmp_path: Path) -> None:
    """Stopped after every round and taken up again, it is the run that was never stopped."""
    whole = mixfed.train(stopped_task(), "oracle", progress=False)
    request = stopped_task()
    from mixfed.experiments.build import build
    from mixfed.experiments.folder import RunFolder
    from mixfed.experiments.running import run_in_folder

    recipe = request.on(request.base(), algorithm="oracle")
    folder = RunFolder(tmp_path / "run")
    for _ in range(40):
        begun = folder.config.exists()
        result = run_in_folder(build(recipe), folder, resume=begun, should_stop=lambda: True)
        if result.finished:
            break
    assert (result.rounds, result.ended) == (whole.rounds, whole.ended)
    assert all(torch.equal(result.params[name], x) for name, x in whole.params.items())


def test_budgets_are_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "digits", *TINY, "--executor", "loop"]
    here(*run, "--rounds", "50", "--max-bytes", "200000", "--out", tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 1 < result["rounds"] < 50
    assert "200,000 were allowed" in result["ended"]
    assert f"Ended early: {result['ended']}" in capsys.readouterr().out
    assert result["ended"] in (tmp_path / "run" / "report.html").read_text()
    assert "there is no validation part" in refused(capsys, *run, "--set", "stop.metric=accuracy").lower()
    assert "stop.metric" in refused(capsys, *run, "--set", "stop.metric=acuracy")
