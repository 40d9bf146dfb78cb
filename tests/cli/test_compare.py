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


DULL = """
rounds = 1
cohort = 2
[data]
source = "files"
clients = "clients.npz"
test = "clients.npz"
client = "who"
[client]
steps = 1
"""


def test_what_is_said_of_the_data_is_said_once(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x, y, who = draw.normal(size=(60, 4)).astype(np.float32), draw.integers(0, 2, 60), np.arange(60) % 3
    np.savez(tmp_path / "clients.npz", x=x * [1, 1, 0, 0], y=y, who=who)
    (tmp_path / "dull.toml").write_text(DULL)
    out, algorithms = tmp_path / "out", "fedavg,fedprox,fedadam"
    done = mixfed("compare", tmp_path / "dull.toml", "--algorithms", algorithms, "--executor", "loop", "--out", out)
    assert done.stderr.count("Of the 4 features in 'x', 2 never change") == 1
    for name in algorithms.split(","):
        warnings = json.loads((out / f"{name}-seed0" / "result.json").read_text())["warnings"]
        assert any("2 never change" in sentence for sentence in warnings)


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
