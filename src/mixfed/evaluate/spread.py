"""How a finished model does in detail: client by client, and class by class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.core.algorithm import Algorithm
from mixfed.core.predict import answers
from mixfed.core.private import PrivateStore
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.evaluate.many import own_examples
from mixfed.evaluate.metrics import EXAMPLE_METRICS, Metric, name_of
from mixfed.evaluate.personal import in_one_place, models


def by_client(
    algorithm: Algorithm,
    params: Params,
    privates: PrivateStore,
    data: FederatedData,
    metric: str | Metric,
    clients: NDArray[np.int64],
) -> NDArray[np.float64]:
    """The metric of each of these clients on its own examples, by its own model where it has one.

    The metric is ``loss``, or one that is a mean over examples, by its name or as a function. Every client must have
    examples.
    """

    own = metric if not isinstance(metric, str) else EXAMPLE_METRICS.get(metric)
    one = own or algorithm.model.criterion

    def values(outputs: Any, batch: Batch) -> NDArray[np.float64]:
        return np.asarray(one(outputs, batch).double().cpu().numpy())

    if algorithm.personal is None:
        pooled = data.select(clients).pooled()
        each = np.concatenate([values(outputs, batch) for batch, outputs in answers(algorithm.model, params, pooled)])
        sizes = data.sizes(clients)
        return np.asarray(np.add.reduceat(each, np.cumsum(sizes) - sizes) / sizes)
    found: dict[int, list[NDArray[np.float64]]] = {}
    for theirs, batch, outputs in _answers_of(algorithm, params, privates, data, clients):
        apart = np.split(values(outputs, batch), np.cumsum(list(theirs.values()))[:-1])
        for client, some in zip(theirs, apart, strict=True):
            found.setdefault(client, []).append(some)
    means = [np.concatenate(parts).mean() for parts in found.values()]
    return np.array([value for part in privates.from_all(means) for value in part])


def spread_test(
    algorithm: Algorithm, data: FederatedData, metrics: Sequence[str | Metric], percentiles: Mapping[str, int]
) -> Callable[[Params, Any], dict[str, float]]:
    """Percentiles over clients of each metric on the clients' own examples, as ``metric_NAME`` for every name.

    Metrics are ``loss`` and those that are means over examples, which functions of the user's own are too.
    """
    for metric in metrics:
        if isinstance(metric, str) and metric != "loss" and metric not in EXAMPLE_METRICS:
            raise InputError(f"Percentiles over clients are of loss and of means over examples, not of '{metric}'.")
    clients = np.flatnonzero(data.sizes() > 0)

    def evaluate(params: Params, privates: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in metrics:
            values = by_client(algorithm, params, in_one_place(privates), data, metric, clients)
            found |= {f"{name_of(metric)}_{name}": float(np.percentile(values, p)) for name, p in percentiles.items()}
        return found

    return evaluate


def confusion(
    algorithm: Algorithm,
    params: Params,
    privates: PrivateStore,
    data: CentralData | FederatedData,
    classes: int,
) -> NDArray[np.int64]:
    """How often examples of class i were taken for class j: [true, answered].

    Of central data the common model is asked; of clients' own data each client's own model.
    """
    table = np.zeros((classes, classes), np.int64)
    if isinstance(data, FederatedData):
        of_clients = _answers_of(algorithm, params, privates, data, np.flatnonzero(data.sizes() > 0))
        found = ((batch, outputs) for _, batch, outputs in of_clients)
    else:
        found = ((batch, outputs) for batch, outputs in answers(algorithm.model, params, data))
    for batch, outputs in found:
        single = outputs.shape[-1] == 1
        answered = (outputs.reshape(-1) > 0).long() if single else outputs.argmax(-1)
        np.add.at(table, (batch["y"].long().cpu().numpy(), answered.cpu().numpy()), 1)
    return np.sum(privates.from_all(table), axis=0) if isinstance(data, FederatedData) else table


def _answers_of(
    algorithm: Algorithm, params: Params, privates: PrivateStore, data: FederatedData, clients: NDArray[np.int64]
) -> Iterator[tuple[dict[int, int], Batch, Any]]:
    """The answers of each client's own model to its own examples."""
    own = algorithm.personal or (lambda params, private: params)
    return own_examples(algorithm.model, params, models(own, params, privates, clients), data)
