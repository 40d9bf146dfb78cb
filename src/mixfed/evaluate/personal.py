"""How good clients' own models are: on known devices (local test) and on unknown ones (new test).

The local test asks each client's own model about the client's own test examples. The new test does not know whose an
example is, so it asks the models of all clients that have trained and averages their outputs; or, much cheaper, it
averages their weights once and asks the one model. Clients are visited some at a time: memory does not grow with
their number. Where several processes simulate clients together, each visits its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mixfed.core import tree
from mixfed.core.algorithm import CLIENTS, Algorithm, Personal, Private
from mixfed.core.backend import Question, RemoteClients
from mixfed.core.loop import Evaluate, OnSets
from mixfed.core.model import Model
from mixfed.core.predict import answers
from mixfed.core.private import PrivateStore
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.evaluate.many import own_examples, same_examples
from mixfed.evaluate.metrics import Figures, Metrics, leads, measure, name_of


def in_one_place(privates: PrivateStore | RemoteClients) -> PrivateStore:
    """All clients' private parts, for an evaluation that needs them together."""
    if isinstance(privates, RemoteClients):
        raise InputError(
            "This evaluation needs the private parts of all clients in one place, and theirs stay on their devices; use"
            " the local test, or the simulator."
        )
    return privates


def combined(*evaluations: Evaluate) -> OnSets:
    """Several evaluations as one."""

    def evaluate(params: Params, privates: PrivateStore) -> dict[str, float]:
        return {name: value for each in evaluations for name, value in each(params, privates).items()}

    told = [each.sets for each in evaluations if isinstance(each, OnSets)]
    return OnSets(evaluate, {name: data for sets in told for name, data in sets.items()})


def local_test(
    algorithm: Algorithm,
    data: FederatedData,
    metrics: Metrics = ("accuracy",),
    *,
    clients: ArrayLike | None = None,
    name: str = "local",
    on: str = "test",
) -> OnSets:
    """Each client's own model on the client's own test examples, every example counting the same.

    A client that has not trained yet uses the common model. ``clients`` limits the test to some. Clients that are
    elsewhere are asked about the examples ``on`` their devices, and answer with sums.
    """
    chosen = np.arange(len(data)) if clients is None else np.asarray(clients)
    chosen = chosen[data.sizes(chosen) > 0]
    if not len(chosen):
        raise InputError("Clients have no test examples of their own; keep a share of each client's examples apart.")
    pooled = data.select(chosen).pooled()

    def evaluate(params: Params, privates: PrivateStore | RemoteClients) -> dict[str, float]:
        if isinstance(privates, RemoteClients):
            found = privates.ask(params, Question(on, [name_of(metric) for metric in metrics], chosen))
        elif algorithm.personal is None:
            found = measure(algorithm.model, params, pooled, metrics) if leads(privates) else {}
        else:
            figures, total = Figures(algorithm.model, metrics), Figures(algorithm.model, metrics)
            owned = models(algorithm.personal, params, privates, chosen)
            for _, batch, outputs in own_examples(algorithm.model, params, owned, data):
                figures.add(outputs, batch)
            for parts in privates.from_all(figures.parts()):
                total.merge(parts)
            found = total.result()
        return {f"{metric}_{name}": value for metric, value in found.items()}

    return OnSets(evaluate, {name: pooled})


def new_test(algorithm: Algorithm, data: CentralData, metrics: Metrics = ("accuracy",), *, name: str = "new") -> OnSets:
    """The mean of the outputs of all clients' models, on examples of which the device is not known."""

    def evaluate(params: Params, privates: PrivateStore) -> dict[str, float]:
        figures = Figures(algorithm.model, metrics)
        for batch, outputs in ensemble(algorithm.model, algorithm.personal, data, params, in_one_place(privates)):
            figures.add(outputs, batch)
        return {f"{metric}_{name}": value for metric, value in figures.result().items()}

    return OnSets(evaluate, {name: data})


def averaged_test(
    algorithm: Algorithm, data: CentralData, metrics: Metrics = ("accuracy",), *, name: str = "averaged"
) -> OnSets:
    """One model with the mean of the weights of all clients' models, on examples of which the device is not known."""

    def evaluate(params: Params, privates: PrivateStore) -> dict[str, float]:
        mean = average(algorithm.personal, params, in_one_place(privates))
        found = measure(algorithm.model, mean, data, metrics)
        return {f"{metric}_{name}": value for metric, value in found.items()}

    return OnSets(evaluate, {name: data})


def models(
    personal: Personal, params: Params, privates: PrivateStore, clients: ArrayLike | None = None
) -> Iterator[tuple[int, Params]]:
    """The models of those of these clients, or of all that have trained, that are here, one at a time."""
    trained = privates.seen(CLIENTS)
    known = set(trained.tolist())
    for client in privates.here(CLIENTS, trained if clients is None else np.asarray(clients)).tolist():
        kept: Private = privates.get(CLIENTS, client) if client in known else {}
        yield client, personal(params, kept) if kept else params


def ensemble(
    model: Model, personal: Personal | None, data: CentralData, params: Params, privates: PrivateStore
) -> Iterator[tuple[Batch, Tensor]]:
    """The batches of a set, each with the mean of the outputs of all clients' models."""
    if personal is None or not len(privates.seen(CLIENTS)):
        yield from answers(model, params, data)
        return
    totals: list[Tensor] = []
    count = 0
    for number, _, outputs in same_examples(model, params, models(personal, params, privates), data):
        total = outputs.sum(0) if isinstance(outputs, Tensor) else reduce(torch.add, outputs)
        if number == len(totals):
            totals.append(total)
        else:
            totals[number] += total
        count += 0 if number else len(outputs)
    parts = [part for part in privates.from_all((totals, count)) if part[1]]
    count = sum(some for _, some in parts)
    for number, (batch, _) in enumerate(answers(model, params, data)):
        yield batch, reduce(torch.add, [part[number] for part, _ in parts]) / count


def average(personal: Personal | None, params: Params, privates: PrivateStore) -> Params:
    """The mean of the weights of all clients' models."""
    if personal is None or not len(privates.seen(CLIENTS)):
        return params
    total: Params = {}
    count = 0
    for _, own in models(personal, params, privates):
        wide = tree.map_leaves(lambda x: x.to(torch.promote_types(x.dtype, torch.float32)), own)
        total = tree.add(total, wide) if count else tree.clone(wide)
        count += 1
    parts = [part for part in privates.from_all((total, count)) if part[1]]
    return tree.scale(reduce(tree.add, [part for part, _ in parts]), 1 / sum(some for _, some in parts))
