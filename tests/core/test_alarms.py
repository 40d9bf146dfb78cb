"""A run that goes wrong says so, once, while it happens and in its result."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mixfed as mf
from tests.problems import blobs, small_mlp


def run(
    caplog: pytest.LogCaptureFixture | None = None, rate: float = 0.1, rounds: int = 6, **options: Any
) -> mf.Result:
    """Three classes of points, one of them at the centre."""
    clients, central, test = blobs()
    model = options.pop("model", None) or small_mlp()
    trainer = mf.LocalTrainer(model, mf.sgd(rate), mf.Batching(4, epochs=1))
    make = options.pop("algorithm", lambda t: mf.parallel(t, t))
    options = {"central": central, "evaluate": mf.evaluator(model, test), "every": 2} | options
    return mf.run(make(trainer), options.pop("data", clients), rounds=rounds, cohort=12, **options)


def test_a_sound_run_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    result = run()
    assert (result.warnings, result.broken, caplog.messages) == ([], "", [])


def test_a_loss_that_explodes(caplog: pytest.LogCaptureFixture) -> None:
    result = run(rate=10.0)
    assert result.broken.startswith("The loss rose from 1.")
    assert "lower the learning rates" in result.warnings[0]
    assert [m for m in caplog.messages if m.startswith("The loss rose")] == result.warnings[:1]


def test_no_progress() -> None:
    (told,) = run(rate=1e-7).warnings
    assert told.startswith("After 6 rounds the model is no better than at the start (loss 1.")


def test_one_answer_only(caplog: pytest.LogCaptureFixture) -> None:
    """A bias that nothing can outweigh."""
    model = small_mlp()
    module = model.module()
    with torch.no_grad():
        module[2].bias[1] = 100.0
    stubborn = mf.Model(module, mf.cross_entropy, trainable=lambda name: name == "0.weight")
    told = [sentence for sentence in run(model=stubborn).warnings if "the answer 1 to all 200" in sentence]
    assert len(told) == 1
    assert "After round 4" in told[0]  # half way
    assert caplog.messages.count(told[0]) == 1


def test_updates_that_were_dropped_are_counted_by_client(caplog: pytest.LogCaptureFixture) -> None:
    clients, _, _ = blobs()
    clients.arrays["x"][clients.offsets[3]] = np.nan
    result = run(data=clients, rounds=4)
    assert "4 client updates had a number that is not finite and were dropped: client 3 of 'clients' (4)." in (
        result.warnings
    )
    assert sum("client 3 of 'clients' (1)" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_centre_that_makes_the_model_not_finite_is_named(alone: bool) -> None:
    def wild(trainer: mf.LocalTrainer) -> mf.Algorithm:
        centre = mf.LocalTrainer(trainer.model, mf.sgd(1e30), mf.Batching(0, steps=3))
        return mf.center(centre) if alone else mf.parallel(trainer, centre)

    with pytest.raises(mf.RunStopped, match="The centre's training made numbers of the model that are not finite"):
        run(algorithm=wild, every=6)


def test_a_resumed_run_does_not_repeat_its_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clients, _, _ = blobs()
    clients.arrays["x"][clients.offsets[3]] = np.nan
    whole = run(data=clients, rate=1e-7)
    asked = iter([False, False, True])
    run(data=clients, rate=1e-7, checkpoints=mf.Checkpoints(tmp_path), should_stop=lambda: next(asked))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        result = run(data=clients, rate=1e-7, checkpoints=mf.Checkpoints(tmp_path), resume=True)
    assert result.warnings == whole.warnings
    assert caplog.messages == [sentence for sentence in whole.warnings if "no better" in sentence]


def test_a_model_whose_answers_are_no_classes_is_watched_by_its_loss() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 3)).astype(np.float32)
    fields = {"x": x, "y": x.sum(axis=1)}
    model = mf.Model(nn.Linear(3, 1), mf.squared_error)
    data = mf.FederatedData.from_arrays(fields, np.arange(60) % 6)
    test = mf.evaluator(model, mf.CentralData.from_arrays(fields | {"x": x + 1e-3}), ["loss"])
    for rate, told in ((0.1, []), (1e-9, ["no better"])):
        fedavg = mf.fedavg(mf.LocalTrainer(model, mf.sgd(rate), mf.Batching(0, steps=2)))
        found = mf.run(fedavg, data, rounds=3, cohort=6, evaluate=test, every=3).warnings
        assert [word in sentence for sentence, word in zip(found, told, strict=True)] == [True] * len(told)
