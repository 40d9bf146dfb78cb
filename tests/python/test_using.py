"""A trained model outside of mixfed gives the answers that it gave inside."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import mixfed
from mixfed.experiments.build import build
from mixfed.experiments.request import Request
from tests.cli.tools import here, refused

TINY = ["data.partition.clients=8", "cohort=3", "evaluate.every=1", "rounds=2", "simulator.executor=loop"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of digits whose clients have own models, and its result."""
    folder = tmp_path_factory.mktemp("using") / "run"
    request = Request("digits", [*TINY, "data.own_test=0.3"])
    return folder, mixfed.train(request, "lg_fedavg", out=folder, progress=False)


def digits() -> np.ndarray:
    return build(Request("digits", TINY).on(Request("digits", TINY).base())).scenario.test.arrays["x"]


def test_the_network_of_a_run_answers_as_the_result_does(run: tuple[Path, Any]) -> None:
    folder, result = run
    x = torch.from_numpy(digits())
    with torch.no_grad():
        assert torch.equal(mixfed.load(folder)(x), result.predict(x, raw=True))


def test_a_client_has_its_own_network(run: tuple[Path, Any]) -> None:
    folder, result = run
    client = int(result.privates.seen("clients")[0])
    own = dict(mixfed.load(folder, client=client).state_dict())
    common = mixfed.load(folder).state_dict()
    assert torch.equal(own["3.weight"], common["3.weight"])  # the last layer is global
    assert torch.equal(own["1.weight"], result.privates.get("clients", client)["local"]["1.weight"])
    absent = next(c for c in range(8) if c not in result.privates.seen("clients"))
    with pytest.raises(mixfed.InputError, match=f"Client {absent} never trained"):
        mixfed.load(folder, client=absent)


def test_other_programs_get_the_same_answers(
    run: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    folder, result = run
    x = digits()[:7]
    wanted = result.predict(x, raw=True).numpy()
    here("export", folder, "--to", "onnx", "--out", tmp_path / "model.onnx")
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]  # the exporter's words about itself
    assert not recwarn.list
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, atol=1e-5)
    here("export", folder)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    plain.load_state_dict(torch.load(folder / "model.pt"))
    with torch.no_grad():
        np.testing.assert_allclose(plain(torch.from_numpy(x)).numpy(), wanted, atol=1e-6)


def test_a_run_of_objects_wants_its_network_again(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 5, 3)).astype(np.float32), np.arange(40) % 2
    clients = mixfed.FederatedData.from_arrays({"x": x, "y": y}, clients=np.arange(40) % 4)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.cells(x)[0][:, -1])
            return logits

    settings: dict[str, Any] = {"rounds": 1, "cohort": 2, "client": {"steps": 1, "batch_size": 2}}
    task = mixfed.Task(Last(), clients, {"x": x, "y": y}, **settings)
    result = mixfed.train(task, "fedavg", out=tmp_path / "run", progress=False)
    with pytest.raises(mixfed.InputError, match="give its network again"):
        mixfed.load(tmp_path / "run")
    with pytest.raises(mixfed.InputError, match=r"has no parameter 'cells\.bias_hh_l0'"):
        mixfed.load(tmp_path / "run", network=nn.Linear(3, 2))
    with torch.no_grad():
        answers = mixfed.load(str(tmp_path / "run"), network=Last())(torch.from_numpy(x))
    torch.testing.assert_close(answers, result.predict(x, raw=True))


@pytest.mark.parametrize("damage", ["cut", "of another kind", "empty", "gone"])
def test_a_damaged_network_is_told(
    damage: str, run: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run[0], tmp_path / "run")
    model = tmp_path / "run" / "model.safetensors"
    whole = model.read_bytes()
    model.unlink()
    if damage != "gone":
        model.write_bytes({"cut": whole[: len(whole) // 2], "of another kind": b'[{"round": "x"}, 3]'}.get(damage, b""))
    assert "model.safetensors" in refused(capsys, "export", tmp_path / "run")


def test_what_cannot_be_exported(run: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no finished run" in refused(capsys, "export", tmp_path)
    assert "Is a directory" in refused(capsys, "export", run[0], "--out", tmp_path)
    with pytest.raises(mixfed.InputError, match="exported to state_dict or onnx"):
        mixfed.export(run[0], "pickle")
