"""Trackers, with the real packages: what a run reports is what they show, also after an interruption."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.trackers import TRACKERS

from .tools import TINY, WAIT, here, lines, refused, start, wait_for


def interrupted_run(tracker: str, folder: Path, rounds: int) -> list[dict[str, float]]:
    """A tracked run that is stopped once and resumed; returns what metrics.jsonl says."""
    options = ["--rounds", str(rounds), *TINY, "--executor", "loop", "--track", tracker]
    command = ["run", "digits", *options, "--out", folder]
    process = start(*command)
    wait_for(lambda: lines(folder) >= 5, process)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=WAIT)
    assert process.returncode == 143, told
    time.sleep(1.0)  # TensorBoard sorts its files by the second in which they were begun
    here(*command, "--resume")
    return RunFolder(folder).history()


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = interrupted_run("tensorboard", tmp_path / "run", 50)
    shown = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    shown.Reload()
    points = shown.Scalars("accuracy")
    assert [(p.step, pytest.approx(p.value)) for p in points] == [(h["round"], h["accuracy"]) for h in history]
    assert shown.Scalars("ledger/bytes_up")[-1].value > 0


def test_mlflow(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    history = interrupted_run("mlflow", tmp_path / "run", 20)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    run = (tmp_path / "run" / "mlflow-run-id").read_text()
    points = sorted((m.step, m.value) for m in client.get_metric_history(run, "accuracy"))
    assert points == [(h["round"], h["accuracy"]) for h in history]
    assert client.get_run(run).data.params["client.learning_rate"] == "0.1"
    assert client.get_run(run).info.status == "FINISHED"


def test_names_that_mlflow_refuses(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    metrics = "evaluate.metrics=['recall@1', 'class_accuracy']"
    here("run", "digits", *TINY, "--rounds", "1", "--set", metrics, "--track", "mlflow", "--out", tmp_path / "run")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    known = client.get_run((tmp_path / "run" / "mlflow-run-id").read_text()).data.metrics
    assert {"recall_1", "class_accuracy.9"} <= set(known)


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: wandb's own files have the metrics by name, of one run however often it is resumed."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    interrupted_run("wandb", tmp_path / "run", 20)
    identity = (tmp_path / "run" / "wandb-run-id").read_text()
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 2
    for file in files:
        names = [b"accuracy", b"ledger/bytes_up", b"learning_rate"]
        until = time.monotonic() + WAIT  # a process of wandb's own writes the file, and ends after the run has ended
        while (missing := [name for name in names if name not in written_by_wandb(file)]) and time.monotonic() < until:
            time.sleep(0.1)
        assert missing == []


def written_by_wandb(file: Path) -> bytes:
    """What is in wandb's own file, without what is between: a name may break off at the end of a block of 32 KB.

    The file begins with 7 bytes, and each part of a record with its checksum (4 bytes), length (2) and kind (1).
    """
    content, at, found = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        length = int.from_bytes(content[at + 4 : at + 6], "little") if left > 7 else left - 7
        found += content[at + 7 : at + 7 + length]
        at += 7 + length
    return found


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(InputError, match=rf"mixfed\[{name}\]"):
        TRACKERS[name](tmp_path, toml.resolve(toml.load("digits")), False)


def test_what_a_tracker_refuses_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**given: Any) -> None:
        raise RuntimeError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = ["run", "digits", "--rounds", "1", "--executor", "loop", "--out", tmp_path / "run"]
    told = refused(capsys, *run, "--track", "wandb")
    assert "cannot be tracked with wandb (No API key configured. Use `wandb login` to log in)" in told
    assert "WANDB_MODE=offline" in told
