"""Stopped in any way, a run that is resumed ends with the same bytes as one that never stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from .tools import WAIT, lines, mixfed, refused, start, wait_for

ROUNDS = 60
RUN = [
    "run", "digits", "--rounds", str(ROUNDS), "--set", "evaluate.every=1", "--set", "evaluate.sets=['all']",
    "--set", "checkpoint.every=7", "--set", "cohort=4", "--set", "client.momentum=0.5",
    "--set", "client.steps=0", "--set", "client.epochs=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An uninterrupted run, by executor, made when first asked for."""

    @cache
    def run(executor: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / executor
        mixfed(*RUN, "--executor", executor, "--out", folder)
        return folder

    return run


def same(one: Path, other: Path) -> None:
    """Model and metrics are the same to the byte, and so are the costs."""
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (one, other))
    assert first["ledger"] == second["ledger"]
    assert first["metrics"] == second["metrics"]


@pytest.mark.parametrize("executor", ["loop", "auto"])
def test_kill_9_at_several_points(executor: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*RUN, "--executor", executor, "--out", folder]
    for moment in (3, 18, 40):  # before the first checkpoint, and twice between two others
        process = start(*command, *(["--resume"] if folder.exists() else []))
        wait_for(lambda moment=moment: lines(folder) >= moment, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert not (folder / "result.json").exists(), "the run ended before it was killed"
    mixfed(*command, "--resume")
    same(folder, whole(executor))


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_finish_the_round(
    sent: signal.Signals, code: int, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start(*RUN, "--executor", "loop", "--out", folder)
    wait_for(lambda: lines(folder) >= 10, process)
    process.send_signal(sent)
    _, told = process.communicate(timeout=WAIT)
    assert process.returncode == code, told
    assert "go on with: mixfed run digits" in told
    assert "--resume" in told
    done = lines(folder)
    assert f"round {done} of {ROUNDS}" in told
    assert sorted((folder / "checkpoints").iterdir())[-1].name == f"round-{done:08d}.safetensors"
    mixfed(*RUN, "--executor", "loop", "--out", folder, "--resume")
    same(folder, whole("loop"))


def test_a_torn_checkpoint_is_passed_over(whole: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(*RUN, "--executor", "loop", "--out", folder)
    wait_for(lambda: lines(folder) >= 25, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    newest = sorted((folder / "checkpoints").glob("round-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-50])
    (folder / "checkpoints" / ".round-00000099.safetensors.partial").write_bytes(b"half")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"round": 99, "lo')
    mixfed(*RUN, "--executor", "loop", "--out", folder, "--resume")
    same(folder, whole("loop"))


def test_more_rounds_can_be_added_and_nothing_else_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["run", "digits", "--executor", "loop", "--out", tmp_path / "run"]
    mixfed(*short, "--rounds", "5", "--set", "evaluate.every=1")
    for change in (
        ["--seed", "7"],
        ["--set", "client.learning_rate=0.3"],
        ["--algorithm", "fedprox"],
        ["--rounds", "4"],
    ):
        assert "--resume cannot make it" in refused(capsys, *short, "--resume", *change)
    assert "already holds a run" in refused(capsys, *short, "--rounds", "5")
    mixfed(*short, "--rounds", "9", "--resume")
    mixfed(*short[:-1], tmp_path / "whole", "--rounds", "9", "--set", "evaluate.every=1")
    same(tmp_path / "run", tmp_path / "whole")
    before = (tmp_path / "run" / "result.json").read_bytes()
    assert "9 rounds" in mixfed(*short, "--resume").stdout  # finished: told again, not run again
    assert (tmp_path / "run" / "result.json").read_bytes() == before
