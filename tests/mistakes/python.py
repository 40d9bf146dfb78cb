"""Mistakes with data, networks and training, made in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import mixfed as mf

from .table import Mistake

Arrays = dict[str, Any]
PEOPLE = ["anna", "ben", "carla", "dan"]


def examples(n: int, seed: int, classes: int = 3) -> Arrays:
    """Points whose label is the larger of their first numbers."""
    x = np.random.default_rng(seed).normal(size=(n, 6)).astype(np.float32)
    return {"x": x, "y": x[:, :classes].argmax(axis=1)}


def trained(
    clients: Callable[[Arrays], Any] = lambda arrays: arrays,
    centre: Callable[[Arrays], Any] = lambda arrays: arrays,
    test: Callable[[Arrays], Any] = lambda arrays: arrays,
    *,
    algorithm: Callable[[mf.LocalTrainer], Any] = lambda trainer: mf.parallel(trainer, trainer),
    criterion: Any = mf.cross_entropy,
    optimizer: Any = None,
    network: Any = None,
    rounds: int = 3,
    cohort: int = 2,
    batch: int = 10,
    **model: Any,
) -> list[str]:
    """A small run in which one thing is changed; its warnings."""
    torch.manual_seed(0)
    wrapped = mf.Model(network or nn.Linear(6, 3), criterion, **model)
    trainer = mf.LocalTrainer(wrapped, optimizer or mf.sgd(0.1), mf.Batching(batch, epochs=1))
    given = clients(examples(80, 0))
    data = mf.FederatedData.from_arrays(given, np.repeat(PEOPLE, 20)) if isinstance(given, dict) else given
    central = mf.CentralData.from_arrays(centre(examples(60, 1)))
    evaluate = mf.evaluator(wrapped, mf.CentralData.from_arrays(test(examples(60, 2))))
    result = mf.run(
        algorithm(trainer), data, central=central, rounds=rounds, cohort=cohort, evaluate=evaluate, every=rounds
    )
    return result.warnings


def to(field: str, change: Callable[[Any], Any]) -> Callable[[Arrays], Arrays]:
    """Another field in place of one."""
    return lambda arrays: arrays | {field: change(arrays[field])}


def spoiled(rows: Any) -> Callable[[Arrays], Arrays]:
    def change(x: Any) -> Any:
        x = x.copy()
        x[rows, 2] = np.nan
        return x

    return to("x", change)


def renamed(old: str, new: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {new if name == old else name: x for name, x in arrays.items()}


def few(arrays: Arrays, count: int) -> Arrays:
    return {name: x[:count] for name, x in arrays.items()}


def without(x: Any) -> Any:
    return x * (np.arange(6) != 4)


def guided(trainer: mf.LocalTrainer) -> mf.Algorithm:
    return mf.feddle(trainer, mf.Search(mf.Batching(10, steps=2)))


def task(**given: Any) -> mf.Task:
    """A task in which one thing is changed."""
    torch.manual_seed(0)
    clients = mf.FederatedData.from_arrays(examples(80, 0), np.repeat(PEOPLE, 20))
    whole: dict[str, Any] = {"clients": clients, "test": examples(60, 2), "rounds": 1, "cohort": 2}
    return mf.Task(network=given.pop("network", nn.Linear(6, 3)), **whole | given)


def resumed(**given: Any) -> list[str]:
    """A run that is resumed with a task in which one thing is changed."""
    mf.train(task(), "fedavg", out="run", progress=False)
    return mf.train(task(**given), "fedavg", out="run", resume=True, progress=False).warnings


def asked(x: Any) -> Any:
    return mf.train(task(), "fedavg", progress=False).predict(x)


def scored(arrays: Arrays, metrics: Any = ("accuracy",)) -> Any:
    return mf.score(mf.train(task(), "fedavg", progress=False), arrays, metrics)


def loaded(network: Any) -> Any:
    mf.train(task(), "fedavg", out="finished", progress=False)
    return mf.load("finished", network=network)


class Shuffles(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[torch.randperm(len(x))]


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


GRID = {"client.learning_rate": 0.1}
LISTED = {"client.learning_rate": [0.1, 0.2]}
WORDS = np.array(["cat", "dog", "owl"])

MISTAKES = [
    Mistake("Labels from 1 to 3 in the test set alone", lambda: trained(test=to("y", lambda y: y + 1))),
    Mistake("More classes on clients than the network has outputs", lambda: trained(to("y", lambda y: 2 * y))),
    Mistake("Labels with fractions at the centre", lambda: trained(centre=to("y", lambda y: y + 0.5))),
    Mistake("One-hot labels on clients", lambda: trained(to("y", lambda y: np.eye(3)[y]))),
    Mistake("Labels in a column of their own on clients", lambda: trained(to("y", lambda y: y[:, None]))),
    Mistake("Labels that are words", lambda: trained(test=to("y", lambda y: WORDS[y]))),
    Mistake("NaN in the features of one client", lambda: trained(spoiled([3, 5]))),
    Mistake("NaN in the features of all clients", lambda: trained(spoiled(slice(None)))),
    Mistake("NaN at the centre", lambda: trained(centre=spoiled([7]))),
    Mistake("NaN in the test set", lambda: trained(test=spoiled([7]))),
    Mistake("Features in float64", lambda: trained(to("x", lambda x: x.astype(np.float64)))),
    Mistake("Features in float16 in the test set", lambda: trained(test=to("x", lambda x: x.astype(np.float16)))),
    Mistake("Features that are whole numbers", lambda: trained(to("x", lambda x: x.astype(np.int64)))),
    Mistake("A test set whose labels have another name", lambda: trained(test=renamed("y", "label"))),
    Mistake("Central examples whose features have another name", lambda: trained(centre=renamed("x", "features"))),
    Mistake("A test set with fewer features", lambda: trained(test=to("x", lambda x: x[:, :5]))),
    Mistake("An empty test set", lambda: trained(test=lambda arrays: few(arrays, 0))),
    Mistake("Test examples that clients train on", lambda: trained(test=lambda arrays: few(examples(80, 0), 60))),
    Mistake("A feature that never changes", lambda: trained(*[to("x", without)] * 3)),
    Mistake("A device that this machine does not have", lambda: trained(device="cuda:7")),
    Mistake("nn.CrossEntropyLoss() as the criterion", lambda: trained(criterion=nn.CrossEntropyLoss())),
    Mistake("A criterion that averages", lambda: trained(criterion=lambda out, batch: out.square().mean())),
    Mistake("A torch optimizer", lambda: trained(optimizer=torch.optim.SGD(nn.Linear(6, 3).parameters(), 0.1))),
    Mistake("The class of a network in place of a network", lambda: trained(network=nn.Linear)),
    Mistake("Tensors in place of clients", lambda: trained(lambda arrays: torch.tensor(arrays["x"]))),
    Mistake("The name of a method in place of the method", lambda: trained(algorithm=lambda trainer: "fedavg")),
    Mistake("BatchNorm, and a batch of one example", lambda: trained(network=normalised(), batch=19)),
    Mistake("A network that shuffles its examples", lambda: trained(network=Shuffles(6, 3))),
    Mistake("A test set of a task that is a pair", lambda: task(test=tuple(examples(60, 2).values()))),
    Mistake("A share as a task's validation examples", lambda: task(validation=0.2)),
    Mistake("nn.CrossEntropyLoss() in a task", lambda: task(criterion=nn.CrossEntropyLoss())),
    Mistake('One method as a text: `compare(task, "fedavg")`', lambda: mf.compare(task(), "fedavg")),
    Mistake("No method: `compare(task, [])`", lambda: mf.compare(task(), [])),
    Mistake("A number of seeds in place of their list", lambda: mf.compare(task(), ["fedavg"], seeds=3)),
    Mistake("A packaged method itself in place of its name", lambda: mf.train(task(), mf.fedavg)),
    Mistake("Words as the labels of a task's test set", lambda: task(test=to("y", lambda y: WORDS[y])(examples(9, 2)))),
    Mistake("Fewer names than classes", lambda: task(names=("cat", "dog"))),
    Mistake("A task resumed, and no word on where", lambda: mf.train(task(), "fedavg", resume=True)),
    Mistake("A task tuned without validation examples", lambda: mf.tune(task(), ["fedavg"], LISTED, progress=False)),
    Mistake("The minutes of an advice as a text", lambda: mf.advise(task(), minutes="5")),
    Mistake("A metric that is not there, in a score", lambda: scored(examples(9, 2), ["acuracy"])),
    Mistake('One metric as a text: `score(result, data, "accuracy")`', lambda: scored(examples(9, 2), "accuracy")),
    Mistake("The class of a network for a run's weights", lambda: loaded(nn.Linear)),
    Mistake("A number in place of a grid's list", lambda: mf.tune(task(), ["fedavg"], GRID)),
    Mistake("A run resumed with another network", lambda: resumed(network=nn.Linear(6, 3))),
    Mistake("Questions in float64", lambda: asked(np.zeros((2, 6)))),
    Mistake("A score without labels", lambda: scored({"x": examples(9, 2)["x"]})),
    Mistake("A cohort of more clients than there are", lambda: trained(cohort=5)),
    Mistake(
        "Feddle, and a class that only the centre has",
        lambda: trained(to("y", lambda y: y.clip(max=1)), algorithm=guided),
    ),
]
