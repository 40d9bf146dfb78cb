"""A run killed without warning while clients are in flight, and resumed, ends as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path

from .tools import TINY, WAIT, here, lines, start, wait_for

COMMAND = [
    *("run", "digits", "--algorithm", "feddle", "--rounds", "40", "--executor", "loop", *TINY),
    *("--set", "schedule.delay=half_normal", "--set", "schedule.sd=3", "--set", "simulator.in_flight=disk"),
    *("--set", "algorithms.feddle.anchors=disk", "--set", "algorithms.feddle.atlas=6", "--set", "checkpoint.every=4"),
]


def test_killed_with_clients_in_flight_and_resumed(tmp_path: Path) -> None:
    process = start(*COMMAND, "--out", tmp_path / "killed")
    wait_for(lambda: lines(tmp_path / "killed") >= 6, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WAIT)
    assert not (tmp_path / "killed" / "result.json").exists()
    here(*COMMAND, "--out", tmp_path / "killed", "--resume")
    here(*COMMAND, "--out", tmp_path / "straight")
    for name in ("model.safetensors", "metrics.jsonl", "diagnostics.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name
