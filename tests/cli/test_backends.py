"""``--backend loopback``: the same run behind bytes, federated evaluation included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.tools import here, refused

TINY = [
    "--rounds",
    "3",
    "--set",
    "algorithms.lg_fedavg.warm_start=0",
    "--executor",
    "loop",
    "--set",
    "simulator.threads=1",
    "--set",
    "data.partition.clients=8",
]
OWN = [
    "--set",
    "cohort=4",
    "--set",
    "evaluate.every=1",
    "--set",
    "evaluate.sets=['local']",
    "--set",
    "data.own_test=0.3",
]


@pytest.mark.parametrize("algorithm", ["lg_fedavg", "fedavg", "local"])
def test_clients_evaluate_their_own_models_and_send_sums(algorithm: str, tmp_path: Path) -> None:
    """The local test of both backends is the same: accuracy to the last example, the loss but for round-off."""
    found = {}
    for backend in ("simulator", "loopback"):
        out = tmp_path / backend
        here("run", "lg-digits", "--algorithm", algorithm, *TINY, *OWN, "--backend", backend, "--out", out)
        found[backend] = json.loads((out / "result.json").read_text())
    one, other = found["simulator"], found["loopback"]
    assert one["metrics"].keys() == other["metrics"].keys()
    for name, value in one["metrics"].items():
        assert name.endswith("_local")
        assert value == pytest.approx(other["metrics"][name], rel=1e-6)
    assert one["ledger"] == other["ledger"]
    models = [(tmp_path / backend / "model.safetensors").read_bytes() for backend in found]
    assert models[0] == models[1]
    assert other["simulation"]["backend"] == "loopback"


def test_what_needs_all_models_in_one_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "lg-digits", *TINY, "--backend", "loopback", "--out", tmp_path / "run"]
    told = refused(capsys, *command, "--set", "evaluate.sets=['new']")
    assert "stay on their devices" in told
    assert "evaluate.sets" in told
