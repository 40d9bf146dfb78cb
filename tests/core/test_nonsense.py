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
    "rate below 0": (lambda: optim.sgd(-1), "A learning rate is a number that is at least 0, not -1"),
    "rate nan": (lambda: optim.adam(NAN), "A learning rate"),
    "rate inf": (lambda: optim.yogi(INF), "A learning rate"),
    "rate text": (lambda: optim.sgd("much"), "A learning rate"),  # type: ignore[arg-type]
    "rate of another": (lambda: optim.with_rate(optim.sgd(1.0), -1.0), "A learning rate"),
    "decay -1": (lambda: optim.sgd(0.1, decay=-1), "The decay of a learning rate .* above 0 and at most 1, not -1"),
    "decay 0": (lambda: optim.adagrad(0.1, decay=0), "The decay of a learning rate"),
    "decay 2": (lambda: optim.adam(0.1, decay=2), "The decay of a learning rate"),
    "decay of another": (lambda: replace(optim.sgd(0.1), decay=NAN), "The decay of a learning rate"),
    "momentum 5": (lambda: optim.sgd(0.1, momentum=5), "Momentum .* at least 0 and below 1, not 5"),
    "momentum 1": (lambda: optim.sgd(0.1, momentum=1.0), "Momentum"),
    "momentum -1": (lambda: optim.sgd(0.1, momentum=-1.0), "Momentum"),
    "betas": (lambda: optim.adam(0.1, betas=(2, 3)), "A beta is .* not 2"),
    "second beta": (lambda: optim.yogi(0.1, betas=(0.9, 1.0)), "A beta"),
    "one beta": (lambda: optim.adam(0.1, betas=(0.9,)), "two betas"),  # type: ignore[arg-type]
    "a number as betas": (lambda: optim.adam(0.1, betas=0.9), "two betas"),  # type: ignore[arg-type]
    "text in betas": (lambda: optim.adam(0.1, betas=("a", "b")), "A beta"),  # type: ignore[arg-type]
    "epsilon -1": (lambda: optim.adam(0.1, epsilon=-1), "epsilon is a number that is above 0, not -1"),
    "epsilon 0": (lambda: optim.adagrad(0.1, epsilon=0), "epsilon"),
    "weight decay": (lambda: optim.sgd(0.1, weight_decay=-5), "Weight decay .* not -5"),
    "weight decay of adam": (lambda: optim.adam(0.1, weight_decay=NAN), "Weight decay"),
    "weight decay of adagrad": (lambda: optim.adagrad(0.1, weight_decay=-5), "Weight decay"),
    "initial": (lambda: optim.adagrad(0.1, initial=-1), "The second moment at the start"),
    "central rounds": (lambda: transfer(trainer(), trainer(), central_rounds=-1), "0 or more rounds at the centre"),
    "sigma": (lambda: delays.LogNormal(1.0, NAN), "The spread of delays"),
    "median": (lambda: delays.LogNormal(INF, 1.0), "The median delay"),
    "seconds": (lambda: delays.LogNormal(1.0, 1.0, INF), "The median delay"),
    "sd": (lambda: delays.HalfNormal(NAN), "The standard deviation"),
    "script": (lambda: delays.Scripted({(0, 1): -1.0}), "Scripted delays"),
    "otherwise": (lambda: delays.Scripted({}, NAN), "Scripted delays"),
    "scale": (lambda: spreadout_of("table", INF), "cannot have the scale inf"),
    "dropout": (lambda: mlp(2, 2, dropout=NAN), "Dropout leaves out"),
    "dropout of a cnn": (lambda: cnn(1, 8, 2, dropout=1.5), "Dropout leaves out"),
    "width": (lambda: ResNet18(2, width=0), "A ResNet needs a width"),
    "odd width": (lambda: ResNet18(2, width=3, norm="group"), "A ResNet needs a width"),
    "resize": (lambda: ResNet18(2, resize=-1), "A ResNet needs a width"),
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
