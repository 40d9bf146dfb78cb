"""Loops of recurrent steps in TorchScript and as Python: the same numbers, with batched and with grouped products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mixfed.models import grouped, steps, unlocked

N, T, B, H = 2, 3, 4, 5

SHAPES = {"first": (B, N, H), "d": (T, B, N, H), "memory": (T, B, N, H), "states": (T + 1, B, N, H)}
SHAPES |= {"cells": (T + 1, B, N, H), "bent": (T, B, N, H), "d_c": (B, N, H)}

CASES: list[tuple[Callable[..., Any], int, list[str], list[Any]]] = [
    (steps.gru_forward, 3, ["given", "first", "weight", "bias"], []),
    (steps.gru_backward, 3, ["d", "given", "memory", "states", "back"], []),
    (steps.lstm_forward, 4, ["given", "first", "first", "weight"], []),
    (steps.lstm_backward, 4, ["d", "d_c", "given", "cells", "bent", "back"], []),
    (steps.rnn_forward, 1, ["given", "first", "weight"], [False]),
    (steps.rnn_forward, 1, ["given", "first", "weight"], [True]),
    (steps.rnn_backward, 1, ["d", "states", "back"], [False]),
    (steps.rnn_backward, 1, ["d", "states", "back"], [True]),
]


def arguments(gates: int, names: list[str]) -> list[Any]:
    """Tensors of these names, and after the weights whether they are grouped."""
    torch.manual_seed(0)
    shapes = SHAPES | {"given": (T, B, N, gates * H), "bias": (N * gates * H,)}
    weight = 0.3 * torch.randn(N, gates * H, H)
    ready = {"weight": steps.ready(weight, B), "back": steps.ready(weight.mT, B)}
    found = [ready[n][0] if n in ready else torch.randn(shapes[n]) for n in names]
    return [*found, ready["weight"][1]]


def outcome(function: Callable[..., Any], names: list[str], given: list[Any]) -> list[Tensor]:
    """What a function gives, and what it makes of its tensors."""
    own = [x if name in ("weight", "back") else x.clone() for name, x in zip(names, given, strict=False)]
    with torch.no_grad():
        answer = function(*own, *given[len(own) :])
    changed = [x for name, x in zip(names, own, strict=True) if name not in ("weight", "back")]
    return [*(answer if isinstance(answer, tuple) else (answer,)), *changed]


@pytest.mark.parametrize(("function", "gates", "names", "options"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_script_and_python_and_both_kinds_of_products_agree(
    function: Callable[..., Any], gates: int, names: list[str], options: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for least in (10**9, 0):
        monkeypatch.setattr(grouped, "PAYS", least)
        given = arguments(gates, names)
        assert given[-1] is (least == 0 and grouped.AVAILABLE)
        for one in (function, function.__wrapped__):  # type: ignore[attr-defined]
            found.append(outcome(one, names, [*given, *options]))
    for others in found[1:]:
        torch.testing.assert_close(others, found[0])
    assert isinstance(unlocked._scripted(function.__wrapped__), torch.jit.ScriptFunction)  # type: ignore[attr-defined]


def test_what_cannot_be_scripted_runs_as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Any) -> Any:
        raise RuntimeError("no TorchScript here")

    monkeypatch.setattr(torch.jit, "script", refuse)
    twice = unlocked.without_lock(lambda x: 2 * x)
    assert float(twice(torch.tensor(3.0))) == 6.0


def test_without_torchscript_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(function: Any) -> Any:
        raise RuntimeError("it is gone")

    monkeypatch.setattr(torch.jit, "script", refuse)
    assert unlocked.without_lock(lambda x: x + 1)(2) == 3
    assert "run as Python" in caplog.text
    assert "it is gone" in caplog.text
