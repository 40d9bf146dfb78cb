"""Loops of recurrent steps in TorchScript and as Python: the same numbers, with PyTorch's and oneDNN's products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mixfed.models import steps
from mixfed.models.products import ONEDNN

N, T, B, H = 2, 3, 4, 5


def given(*names: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"gates": (N, T, B, 3 * H), "states": (N, T, B, H), "state": (N, B, H), "bias": (N, 3 * H)}
    shapes |= {"weight": (N, 3 * H, H), "square": (N, H, H)}
    return [torch.randn(shapes[name]) for name in names]


CASES = [
    (steps.gru_forward, given("gates", "state", "weight", "bias")),
    (steps.gru_backward, given("states", "state", "gates", "states", "states", "state", "weight")),
    (steps.tanh_forward, given("states", "state", "square")),
    (steps.tanh_backward, given("states", "state", "states", "square")),
]


@pytest.mark.parametrize("large", [False, True] if ONEDNN else [False])
@pytest.mark.parametrize(("function", "tensors"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_script_and_python_agree(function: Callable[..., Any], tensors: list[torch.Tensor], large: bool) -> None:
    found = []
    for one in (function, function.__wrapped__):  # type: ignore[attr-defined]
        own = [x.clone() for x in tensors]
        with torch.no_grad():
            answer = one(*own, large)
        found.append([*(answer if isinstance(answer, tuple) else (answer,)), *own])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert isinstance(steps._scripted(function.__wrapped__), torch.jit.ScriptFunction)  # type: ignore[attr-defined]


def test_what_cannot_be_scripted_runs_as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Any) -> Any:
        raise RuntimeError("no TorchScript here")

    monkeypatch.setattr(torch.jit, "script", refuse)
    twice = steps.without_lock(lambda x: 2 * x)
    assert float(twice(torch.tensor(3.0))) == 6.0


def test_without_torchscript_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(function: Any) -> Any:
        raise RuntimeError("it is gone")

    monkeypatch.setattr(torch.jit, "script", refuse)
    assert steps.without_lock(lambda x: x + 1)(2) == 3
    assert "run as Python" in caplog.text
    assert "it is gone" in caplog.text
