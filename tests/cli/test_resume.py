"""Stopped in any way, a run that is resumed ends with the same bytes as one that never stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from .tools import TINY, WAIT, here, last_json, lines, mixfed, refused, start, wait_for

ROUNDS = 90
RUN = [
    "run", "digits", "--rounds", str(ROUNDS), "--set", "evaluate.every=1", "--set", "evaluate.sets=['all']",
    "--set", "checkpoint.every=7", "--set", "cohort=4", "--set", "client.momentum=0.5",
    "--set", "client.steps=0", "--set", "client.epochs=1",
]  # fmt: skip


def same(one: Path, other: Path) -> None:
    """Model and metrics are the same to the byte, and so are the costs."""
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (one, other))
    assert first["ledger"] == second["ledger"]
    assert first["metrics"] == second["metrics"]


def stop_at(moment: int, sent: signal.Signals, command: list[str | Path], folder: Path) -> str:
    """Starts or resumes the run, sends it a signal once ``moment`` rounds, and one of its own, have been reported; what
    it then said."""
    before = lines(folder)
    process = start(*command, *(["--resume"] if folder.exists() else []))
    wait_for(lambda: lines(folder) >= max(moment, before + 1), process)
    process.send_signal(sent)
    _, told = process.communicate(timeout=WAIT)
    assert process.returncode == (-9 if sent is signal.SIGKILL else 128 + sent), told
    assert not (folder / "result.json").exists(), "the run ended before it was stopped"
    return told


def tear(folder: Path) -> None:
    """What a crash of the machine may leave behind: a cut checkpoint, a half-written one, half a line."""
    newest = sorted((folder / "checkpoints").glob("round-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-50])
    (folder / "checkpoints" / ".round-00000099.safetensors.partial").write_bytes(b"half")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"round": 99, "lo')


def test_stopped_in_every_way(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*RUN, "--executor", "loop", "--out", folder]
    stop_at(3, signal.SIGKILL, command, folder)  # before the first checkpoint
    for moment, sent in ((10, signal.SIGINT), (20, signal.SIGTERM)):
        told = stop_at(moment, sent, command, folder)
        done = lines(folder)
        assert f"Stopped after round {done} of {ROUNDS}; go on with: mixfed run digits" in told
        assert "--resume" in told
        assert sorted((folder / "checkpoints").iterdir())[-1].name == f"round-{done:08d}.safetensors"
    stop_at(32, signal.SIGKILL, command, folder)  # between two checkpoints
    tear(folder)
    stop_at(45, signal.SIGKILL, command, folder)
    mixfed(*command, "--resume")
    mixfed("run", folder / "config.toml", "--out", tmp_path / "whole")
    same(folder, tmp_path / "whole")


def test_kill_9_where_the_executor_is_chosen_by_timing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*RUN, "--executor", "auto", "--out", folder]
    for moment in (16, 40):
        stop_at(moment, signal.SIGKILL, command, folder)
    mixfed(*command, "--resume")
    mixfed("run", folder / "config.toml", "--out", tmp_path / "whole")
    same(folder, tmp_path / "whole")


def test_more_rounds_can_be_added_and_nothing_else_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["run", "digits", "--executor", "loop", "--out", tmp_path / "run"]
    here(*short, "--rounds", "5", "--set", "evaluate.every=1")
    for change in (
        ["--seed", "7"],
        ["--set", "client.learning_rate=0.3"],
        ["--algorithm", "fedprox"],
        ["--rounds", "4"],
    ):
        assert "a resumed one cannot have" in refused(capsys, *short, "--resume", *change)
    assert "already holds a run" in refused(capsys, *short, "--rounds", "5")
    here(*short, "--rounds", "9", "--resume")
    here(*short[:-1], tmp_path / "whole", "--rounds", "9", "--set", "evaluate.every=1")
    same(tmp_path / "run", tmp_path / "whole")
    before = (tmp_path / "run" / "result.json").read_bytes()
    capsys.readouterr()
    here(*short, "--resume")  # finished: told again, not run again
    assert "9 rounds" in capsys.readouterr().out
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_resume_where_there_is_no_run_begins_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command that a scheduler can repeat."""
    command = ["run", "digits", "--rounds", "2", *TINY, "--executor", "loop", "--out", tmp_path / "run", "--resume"]
    here(*command)
    assert "holds no run, so one begins there" in " ".join(capsys.readouterr().err.split())
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    here(*command)
    assert "begins" not in capsys.readouterr().err
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model
    compare = ["compare", "digits", "--algorithms", "fedavg", *command[2:-3], "--out", tmp_path / "both", "--resume"]
    here(*compare)
    assert "holds none of these runs, so they begin there" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_ended_broken(tmp_path: Path) -> None:
    """It has exit code 1, its result says why, and one that cannot go on says so again at once."""
    command = ["run", "digits", "--rounds", "4", *TINY, "--executor", "loop", "--set", "client.learning_rate=900"]
    done = mixfed(*command, "--out", tmp_path / "wild", expect=1)
    found = json.loads((tmp_path / "wild" / "result.json").read_text())
    assert found["broken"].endswith("after round 4; lower the learning rates or clip the gradients.")
    assert [sentence.startswith("The loss rose") for sentence in found["warnings"]] == [True]
    assert "The run ended broken. The loss rose" in done.stderr
    wilder = ["--algorithm", "center", "--set", "central.learning_rate=1e30", "--out", tmp_path / "wilder"]
    for _ in range(2):
        done = mixfed(*command, *wilder, "--resume", expect=1)
        assert "The centre's training made numbers of the model that are not finite" in done.stderr
    assert "would stop there again" in done.stderr
    both = ["compare", "digits", "--algorithms", "center,fedavg", *command[2:6], "--rounds", "2"]
    done = mixfed(*both, "--set", "central.learning_rate=1e30", "--out", tmp_path / "both", "--json")
    assert last_json(done)["algorithms"]["center"] == {"metrics": {}, "ledger": {}}
    assert "center, seed 0: The centre's training" in done.stderr
