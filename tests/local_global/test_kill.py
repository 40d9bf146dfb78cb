"""A run with private parts on disk, killed without warning and resumed, ends as if nothing had happened."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from tests.cli.tools import WAIT, mixfed, start

SETTINGS = [
    *("--set", "client.epochs=1", "--set", "evaluate.every=10", "--set", "checkpoint.every=2"),
    *("--set", "simulator.private=disk", "--set", "simulator.executor=loop", "--set", "simulator.threads=1"),
    *("--set", "algorithms.lg_fedavg.warm_start=3", "--rounds", "20"),
]


def test_killed_and_resumed(tmp_path: Path) -> None:
    mixfed("run", "lg-digits", *SETTINGS, "--out", tmp_path / "straight")
    killed = tmp_path / "killed"
    process = start("run", "lg-digits", *SETTINGS, "--out", killed)
    until = time.monotonic() + WAIT
    while not list(killed.glob("checkpoints/round-0000001*")) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (killed / "result.json").exists()
    mixfed("run", "lg-digits", *SETTINGS, "--out", killed, "--resume")
    results = [json.loads((folder / "result.json").read_text()) for folder in (tmp_path / "straight", killed)]
    assert results[0]["metrics"] == results[1]["metrics"]
    assert results[0]["ledger"] == results[1]["ledger"]
    assert (tmp_path / "straight" / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
