"""Settings without meaning are refused where they are given, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mixfed.algorithms.baselines import transfer
from mixfed.core import delays, optim
from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.regularisers import spreadout_of
from mixfed.core.train import LocalTrainer
from mixfed.data.store import CentralData
from mixfed.errors import InputError
from mixfed.evaluate.metrics import evaluator
from mixfed.evaluate.ranking import Recall
from mixfed.models.networks import cnn, linear, mlp
from mixfed.models.resnet import ResNet18

NAN, INF = float("nan"), float("inf")


def trainer() -> LocalTrainer:
    return LocalTrainer(Model(linear(2, 2), cross_entropy), optim.sgd(0.1), Batching(0, steps=1))


NONSENSE: dict[str, tuple[Callable[[], Any], str]] = {
    "rate below 0": (lambda: optim.sgd(-1), "'learning_rate' of sgd must be at least 0, not -1"),
    "rate nan": (lambda: optim.adam(NAN), "'learning_rate' of "),
    "rate inf": (lambda: optim.yogi(INF), "'learning_rate' of "),
    "rate text": (lambda: optim.sgd("much"), "'learning_rate' of "),  # type: ignore[arg-type]
    "rate of another": (lambda: optim.with_rate(optim.sgd(1.0), -1.0), "'learning_rate' of "),
    "decay -1": (lambda: optim.sgd(0.1, decay=-1), "'decay' of sgd must be above 0 and at most 1, not -1"),
    "decay 0": (lambda: optim.adagrad(0.1, decay=0), "'decay' of "),
    "decay 2": (lambda: optim.adam(0.1, decay=2), "'decay' of "),
    "decay of another": (lambda: replace(optim.sgd(0.1), decay=NAN), "'decay' of "),
    "momentum 5": (lambda: optim.sgd(0.1, momentum=5), "'momentum' of sgd must be at least 0 and below 1, not 5"),
    "momentum 1": (lambda: optim.sgd(0.1, momentum=1.0), "'momentum' of sgd"),
    "momentum -1": (lambda: optim.sgd(0.1, momentum=-1.0), "'momentum' of sgd"),
    "betas": (lambda: optim.adam(0.1, betas=(2, 3)), "Each of 'betas' of adam must be .* not 2"),
    "second beta": (lambda: optim.yogi(0.1, betas=(0.9, 1.0)), "Each of 'betas'"),
    "one beta": (lambda: optim.adam(0.1, betas=(0.9,)), "'betas' of adam must be"),  # type: ignore[arg-type]
    "a number as betas": (lambda: optim.adam(0.1, betas=0.9), "'betas' of adam must be"),  # type: ignore[arg-type]
    "text in betas": (lambda: optim.adam(0.1, betas=("a", "b")), "Each of 'betas'"),  # type: ignore[arg-type]
    "epsilon -1": (lambda: optim.adam(0.1, epsilon=-1), "'epsilon' of adam must be a number above 0, not -1"),
    "epsilon 0": (lambda: optim.adagrad(0.1, epsilon=0), "epsilon"),
    "weight decay": (lambda: optim.sgd(0.1, weight_decay=-5), "'weight_decay' of sgd must be at least 0, not -5"),
    "weight decay of adam": (lambda: optim.adam(0.1, weight_decay=NAN), "'weight_decay' of ada"),
    "weight decay of adagrad": (lambda: optim.adagrad(0.1, weight_decay=-5), "'weight_decay' of ada"),
    "initial": (lambda: optim.adagrad(0.1, initial=-1), "'initial' of adagrad"),
    "central rounds": (
        lambda: transfer(trainer(), trainer(), central_rounds=-1),
        "'central_rounds' of transfer must be at least 0",
    ),
    "sigma": (lambda: delays.LogNormal(1.0, NAN), "'sigma' of LogNormal"),
    "median": (lambda: delays.LogNormal(INF, 1.0), "'median' of LogNormal"),
    "seconds": (lambda: delays.LogNormal(1.0, 1.0, INF), "'seconds_per_round' of LogNormal"),
    "sd": (lambda: delays.HalfNormal(NAN), "'sd' of HalfNormal"),
    "script": (lambda: delays.Scripted({(0, 1): -1.0}), "Scripted delays"),
    "otherwise": (lambda: delays.Scripted({}, NAN), "Scripted delays"),
    "scale": (lambda: spreadout_of("table", INF), "'scale' of spreadout_of must be at least 0, not inf"),
    "dropout": (lambda: mlp(2, 2, dropout=NAN), "'dropout' of mlp must be"),
    "dropout of a cnn": (lambda: cnn(1, 8, 2, dropout=1.5), "'dropout' of cnn must be"),
    "width": (lambda: ResNet18(2, width=0), "'width' of ResNet18 must be at least 1"),
    "odd width": (lambda: ResNet18(2, width=3, norm="group"), "has an even width"),
    "resize": (lambda: ResNet18(2, resize=-1), "'resize' of ResNet18 must be at least 0"),
    "evaluation batch": (
        lambda: evaluator(Model(linear(2, 2), cross_entropy), CentralData({"x": [[1.0, 2.0]]}), batch_size=0),
        "batches of at least 1",
    ),
    "recall": (lambda: Recall(0), "1 or more items"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense(name: str) -> None:
    make, told = NONSENSE[name]
    with pytest.raises(InputError, match=told):
        make()


def test_the_ends_of_what_is_allowed() -> None:
    optim.sgd(0.0, momentum=0.0, decay=1.0)
    optim.adam(1, betas=[0, 0.999])  # type: ignore[arg-type]
    delays.Scripted({(0, 0): INF})
    transfer(trainer(), trainer(), central_rounds=0)
