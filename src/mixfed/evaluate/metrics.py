"""Metrics: how good a model is on data it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mixfed.core.algorithm import CLIENTS, Algorithm, Personal
from mixfed.core.backend import RemoteClients
from mixfed.core.loop import OnSets
from mixfed.core.model import Model
from mixfed.core.predict import answers
from mixfed.core.private import PrivateStore
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData
from mixfed.errors import InputError, explained
from mixfed.evaluate.many import Owned, same_examples
from mixfed.evaluate.of_classes import CLASS_METRICS, as_logits, measured
from mixfed.evaluate.ranking import Recall, rank
from mixfed.evaluate.registry import METRICS, RECALLS

Metric = Callable[[Tensor, Batch], Tensor]
"""One number per example from a model's outputs and the batch; the metric is their mean."""


def accuracy(outputs: Tensor, batch: Batch) -> Tensor:
    """Whether the prediction is right: the largest logit, or a single logit above zero. Sequences: the mean."""
    labels = batch["y"]
    if outputs.shape[-1] == 1 or outputs.shape == labels.shape:
        if bool(((labels != 0) & (labels != 1)).any()):
            raise InputError(
                "The accuracy of a model with one output for a label needs labels 0 and 1; give the model an output for"
                " every class, or leave accuracy out of the metrics."
            )
        right = (outputs.reshape(labels.shape) > 0).eq(labels > 0.5)
    else:
        right = outputs.argmax(-1).eq(labels)
    return right.float().reshape(len(labels), -1).mean(dim=1)


EXAMPLE_METRICS: dict[str, Metric] = {"accuracy": accuracy, **{name: Recall(k) for name, k in RECALLS.items()}}
COLLECTED = ("y", "scores", "protected", "logits", "classes")
Metrics = Sequence[str | Metric]
"""Metrics by name, and functions of the user's own, each of which has the name of its function."""


def name_of(metric: str | Metric) -> str:
    """What a metric is called in results."""
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)


def evaluator(
    model: Model,
    data: CentralData | Mapping[str, CentralData],
    metrics: Metrics = ("loss", "accuracy"),
    *,
    personal: Personal | None = None,
    batch_size: int = 1024,
) -> OnSets:
    """A function that evaluates parameters on the data; with several sets, each by name: ``accuracy_chat``.

    A set named "" gives plain names. With ``personal`` clients have models of their own: the metrics are the mean over
    the models of all clients that have trained so far. A metric is a name, or a function of the model's outputs and the
    batch that gives one number per example; its mean has the function's name.
    """
    if batch_size < 1:
        raise InputError(f"A model is evaluated on batches of at least 1 example, not {batch_size}.")
    require_metrics(metrics)
    sets = dict(data) if isinstance(data, Mapping) else {"": data}

    def evaluate(params: Params, privates: PrivateStore) -> dict[str, float]:
        if personal and isinstance(privates, RemoteClients):
            raise InputError("The mean over clients' own models needs them in one place; use the local test.")
        if not personal and not leads(privates):
            return {}
        measured: list[dict[str, float]] = []
        if personal:
            own = personal

            def owned() -> Iterator[Owned]:
                return ((client, own(params, private)) for client, private in privates.items(CLIENTS))

            here = _measure_each(model, params, owned, sets, metrics, batch_size)
            measured = [one for part in privates.from_all(here) for one in part]
        measured = measured or [_measure_all(model, params, sets, metrics, batch_size)]
        return {name: float(np.mean([m[name] for m in measured])) for name in measured[0]}

    return OnSets(evaluate, sets)


def require_metrics(metrics: Metrics) -> None:
    """Refuses metrics that are not there."""
    if isinstance(metrics, str):
        raise InputError(f"The metrics are a list, such as ['{metrics}'], and not a text.")
    for name in metrics:
        if isinstance(name, str) and name not in METRICS:
            raise InputError(f"There is no metric '{name}'; choose from {', '.join(METRICS)}.")


def leads(clients: Any) -> bool:
    """Whether this process evaluates the common model; where several simulate clients together, one of them does."""
    return bool(getattr(clients, "leads", True))


def _measure_all(
    model: Model, params: Params, sets: Mapping[str, CentralData], metrics: Metrics, batch_size: int
) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, data in sets.items():
        values = measure(model, params, data, metrics, batch_size)
        found |= {f"{metric}_{name}" if name else metric: v for metric, v in values.items()}
    return found


def _measure_each(
    model: Model,
    common: Params,
    owned: Callable[[], Iterator[Owned]],
    sets: Mapping[str, CentralData],
    metrics: Metrics,
    batch_size: int,
) -> list[dict[str, float]]:
    """The same for each client's own model."""
    found: list[dict[str, float]] = []
    for name, data in sets.items():
        figures: list[Figures] = []
        first = 0
        for number, batch, outputs in same_examples(model, common, owned(), data, batch_size):
            if not number:
                first = len(figures)
                figures += [Figures(model, metrics) for _ in outputs]
            for one, answer in zip(figures[first:], outputs, strict=True):
                one.add(answer, batch)
        values = [one.result() for one in figures]
        found = found or [{} for _ in values]
        for known, of_set in zip(found, values, strict=True):
            known.update({f"{metric}_{name}" if name else metric: v for metric, v in of_set.items()})
    return found


def measure(
    model: Model, params: Params, data: CentralData, metrics: Metrics, batch_size: int = 1024
) -> dict[str, float]:
    """The metrics of one model on one set, one large batch at a time."""
    figures = Figures(model, metrics)
    for batch, outputs in answers(model, params, data, batch_size):
        figures.add(outputs, batch)
    return figures.result()


def metric_sums(
    algorithm: Algorithm,
    params: Params,
    data: CentralData,
    metrics: Sequence[str],
    own: Mapping[str, Metric] | None = None,
) -> dict[str, float]:
    """What a device answers in a federated evaluation: sums over its own examples.

    Names travel, and functions do not: those of the user's ``own`` are on the device by their names.
    """
    figures = Figures(algorithm.model, [(own or {}).get(name, name) for name in metrics])
    for batch, outputs in answers(algorithm.model, params, data):
        figures.add(outputs, batch)
    return figures.sums()


class Figures:
    """Metrics over outputs that come batch by batch, from one model or from many."""

    def __init__(self, model: Model, metrics: Metrics) -> None:
        self.model, self.metrics = model, [name_of(metric) for metric in metrics]
        own = {name_of(metric): _of_examples(metric) for metric in metrics if not isinstance(metric, str)}
        self._functions = EXAMPLE_METRICS | {"loss": model.criterion} | own
        self.examples = 0
        self._totals: dict[str, float] = {}
        self._collected: dict[str, list[NDArray[Any]]] = {name: [] for name in COLLECTED}

    def add(self, outputs: Any, batch: Batch) -> None:
        """Takes the outputs for one batch."""
        self.examples += len(next(iter(batch.values())))
        ranks = cache(partial(rank, outputs, batch))
        for name in self.metrics:
            if name in RANKING_METRICS or name in CLASS_METRICS:
                continue
            function = self._functions[name]
            values = function.among(ranks()) if isinstance(function, Recall) else function(outputs, batch)
            self._totals[name] = self._totals.get(name, 0.0) + float(values.double().sum())
        if any(name in RANKING_METRICS for name in self.metrics):
            found = {"y": batch["y"], "scores": _scores(outputs.reshape(len(batch["y"]), -1))}
            for name, x in (found | {n: batch[n] for n in ("protected",) if n in batch}).items():
                self._collected[name].append(x.cpu().numpy())
        if any(name in CLASS_METRICS for name in self.metrics):
            for name, array in as_logits(outputs, batch["y"]).items():
                self._collected[name].append(array)

    def parts(self) -> tuple[int, dict[str, float], dict[str, list[NDArray[Any]]]]:
        """Everything so far, for :meth:`merge` in another process."""
        return self.examples, self._totals, self._collected

    def merge(self, parts: tuple[int, dict[str, float], dict[str, list[NDArray[Any]]]]) -> None:
        """Takes what was collected elsewhere."""
        examples, totals, collected = parts
        self.examples += examples
        for name, total in totals.items():
            self._totals[name] = self._totals.get(name, 0.0) + total
        for name, arrays in collected.items():
            self._collected[name] += arrays

    def sums(self) -> dict[str, float]:
        """The sum of each metric over the examples so far, and their number; for metrics that are means."""
        for name in self.metrics:
            if name in RANKING_METRICS or name in CLASS_METRICS:
                raise InputError(f"The metric {name} needs all scores in one place, and clients send sums only.")
        return {**self._totals, "examples": float(self.examples)}

    def result(self) -> dict[str, float]:
        """The metrics over everything so far."""
        found = {name: total / self.examples for name, total in self._totals.items()}
        arrays = {name: np.concatenate(parts) for name, parts in self._collected.items() if parts}
        found |= {name: RANKING_METRICS[name](arrays) for name in self.metrics if name in RANKING_METRICS}
        of_classes = [name for name in self.metrics if name in CLASS_METRICS]
        several = measured(of_classes, arrays, self.model.meaning) if of_classes else {}
        return {key: x for name in self.metrics for key, x in several.get(name, {name: found.get(name, 0.0)}).items()}


def _of_examples(metric: Metric) -> Metric:
    """A metric of the user's own, which must give one number per example."""

    def checked(outputs: Tensor, batch: Batch) -> Tensor:
        with explained(f"The metric '{name_of(metric)}' fails"):
            values = metric(outputs, batch)
        count = len(next(iter(batch.values())))
        if not isinstance(values, Tensor) or values.shape != (count,):
            told = list(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise InputError(
                f"The metric '{name_of(metric)}' gives one number for each example, a tensor of the shape [{count}] for"
                f" {count} of them, not {told}."
            )
        return values

    return checked


def _scores(outputs: Tensor) -> Tensor:
    """How much an example looks like the second class: one logit, or the difference of two."""
    if outputs.shape[1] > 2:
        raise InputError(f"AUC needs a model with one or two outputs, and this one has {outputs.shape[1]}.")
    return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs[:, 0]


def auc(found: Mapping[str, NDArray[Any]]) -> float:
    """The area under the ROC curve of the scores."""
    return area(found["y"], found["scores"])


def area(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    """The area under the ROC curve; not a number where a score is none."""
    from sklearn.metrics import roc_auc_score  # here because it takes a second to import

    if not np.isfinite(scores).all():
        return float("nan")
    if len(np.unique(labels)) != 2:
        raise InputError("AUC needs an evaluation set with two labels.")
    return float(roc_auc_score(labels, scores))


def parity_gap(found: Mapping[str, NDArray[Any]]) -> float:
    """Demographic parity: |P(ŷ = 1 | p = 1) − P(ŷ = 1 | p = 0)|, the largest over the protected attributes."""
    chosen = found["scores"] > 0
    return _largest(_gap(chosen, p) for p in _attributes(found))


def odds_gap(found: Mapping[str, NDArray[Any]]) -> float:
    """Equalised odds: the largest |P(ŷ = 1 | y, p = 1) − P(ŷ = 1 | y, p = 0)| over y and the protected attributes."""
    chosen, true = found["scores"] > 0, found["y"] > 0.5
    return _largest(_gap(chosen[true == y], p[true == y]) for p in _attributes(found) for y in (False, True))


def _attributes(found: Mapping[str, NDArray[Any]]) -> list[NDArray[np.bool_]]:
    if "protected" not in found:
        raise InputError("Fairness gaps need examples with a field 'protected'; say which attributes are protected.")
    return [column > 0.5 for column in found["protected"].reshape(len(found["y"]), -1).T]


def _largest(gaps: Iterable[float]) -> float:
    """The largest gap between groups that both have examples; not a number where there are no such groups."""
    return max((gap for gap in gaps if not np.isnan(gap)), default=float("nan"))


def _gap(chosen: NDArray[np.bool_], group: NDArray[np.bool_]) -> float:
    if group.all() or not group.any():
        return float("nan")
    return float(abs(chosen[group].mean() - chosen[~group].mean()))


RANKING_METRICS: dict[str, Callable[[Mapping[str, NDArray[Any]]], float]] = {
    "auc": auc,
    "parity_gap": parity_gap,
    "odds_gap": odds_gap,
}
