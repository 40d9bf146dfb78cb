"""Running the command as a user does: in a process of its own, or (where only a sentence is at stake) in this one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from mixfed.cli import app
from tests.warm import Process, command

TINY = ["--set", "data.partition.clients=10", "--set", "cohort=3", "--set", "evaluate.every=1"]
WAIT = 300.0


def environment() -> dict[str, str]:
    """One intra-op thread: tests share the machine."""
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "MIXFED_DATA": ""}


def nothing() -> None:
    """What a process does before the command, unless told otherwise."""


def mixfed(
    *arguments: str | Path, expect: int = 0, cwd: Path | None = None, before: Callable[[], object] = nothing
) -> CompletedProcess[str]:
    """Runs the command to its end in a process of its own (after ``before``) and checks its exit code."""
    process = start(*arguments, cwd=cwd, before=before)
    out, err = process.communicate(WAIT)
    assert process.returncode == expect, out + err
    assert "Traceback" not in err
    return CompletedProcess(arguments, expect, out, err)


def start(*arguments: str | Path, cwd: Path | None = None, before: Callable[[], object] = nothing) -> Process:
    """Starts the command in a process of its own and leaves it running."""
    return Process(command, [str(a) for a in arguments], environment(), cwd, before)


def wait_for(condition: Callable[[], bool], process: Process) -> None:
    """Waits until the condition holds, while the process runs."""
    end = time.monotonic() + WAIT
    while not condition():
        assert process.poll() is None, process.told()
        assert time.monotonic() < end, "nothing happened for too long"
        time.sleep(0.005)


def lines(folder: Path) -> int:
    """How many rounds the run in the folder has reported so far."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def last_json(done: CompletedProcess[str]) -> dict[str, Any]:
    """The last line of standard output as strict JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1], parse_constant=refuse)
    return found


def here(*arguments: str | Path) -> None:
    """Runs the command in this process, which saves the seconds that a new one takes to load PyTorch."""
    with pytest.raises(SystemExit) as stop:
        app([str(a) for a in arguments])
    assert stop.value.code == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one sentence with which the command, run in this process, refuses; its exit code must be 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        app([str(a) for a in arguments])
    told = capsys.readouterr()
    assert stop.value.code == 2, told
    assert "Traceback" not in told.err
    (sentence,) = [line for line in told.err.splitlines() if line and not line.startswith("Executor: ")]
    assert sentence.endswith((".", "?"))
    return sentence
