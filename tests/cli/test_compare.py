"""``mixfed compare``: several algorithms and seeds, each in its own folder, and one summary."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from .tools import TINY, WAIT, here, last_json, lines, mixfed, refused, start, wait_for

LEDGER = {"bytes_down", "bytes_up", "client_examples", "server_examples", "client_flops", "server_flops"}


def test_a_comparison_sums_up_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cmp"
    command = ["compare", "digits", "--seeds", "0,1", "--rounds", "3", *TINY, "--executor", "loop", "--out", out]
    done = mixfed(*command, "--algorithms", "fedavg,oracle", "--json")
    comparison = last_json(done)
    assert comparison == json.loads((out / "comparison.json").read_text())
    assert set(comparison) == {"algorithms"}
    assert list(comparison["algorithms"]) == ["fedavg", "oracle"]
    for name, entry in comparison["algorithms"].items():
        assert set(entry) == {"metrics", "ledger"}
        assert set(entry["ledger"]) >= LEDGER
        results = [json.loads((out / f"{name}-seed{seed}" / "result.json").read_text()) for seed in (0, 1)]
        for metric, found in entry["metrics"].items():
            values = [result["metrics"][metric] for result in results]
            assert found == {"mean": np.mean(values), "spread": np.std(values, ddof=1), "values": values}
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "±" in done.stdout

    assert "already holds a comparison" in refused(capsys, *command, "--algorithms", "fedavg")
    changed = [*command, "--set", "client.learning_rate=0.3", "--algorithms", "fedavg", "--resume"]
    assert "client.learning_rate = 0.1" in refused(capsys, *changed)
    model = out / "fedavg-seed0" / "model.safetensors"
    before = model.stat().st_mtime_ns
    here(*command, "--algorithms", "fedavg,center", "--resume")
    again = json.loads((out / "comparison.json").read_text())
    assert list(again["algorithms"]) == ["fedavg", "center"]
    assert again["algorithms"]["fedavg"] == comparison["algorithms"]["fedavg"]
    assert model.stat().st_mtime_ns == before


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "cmp"
    options = ["--rounds", "40", *TINY, "--executor", "loop", "--set", "checkpoint.every=5"]
    command = ["compare", "digits", "--algorithms", "fedavg,transfer", *options]
    process = start(*command, "--out", out)
    wait_for(lambda: lines(out / "transfer-seed0") >= 8, process)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=WAIT)
    assert process.returncode == 130, told
    assert "go on with: mixfed compare digits" in told
    assert not (out / "comparison.json").exists()
    process = start(*command, "--out", out, "--resume")
    wait_for(lambda: lines(out / "transfer-seed0") >= 25, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    here(*command, "--out", out, "--resume")
    here("run", "digits", "--algorithm", "transfer", *options, "--out", tmp_path / "whole")
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (out / "transfer-seed0" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
