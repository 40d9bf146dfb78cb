"""Metrics: how good a model is on data it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.batches import gather
from mixfed.core import CLIENTS, Personal
from mixfed.data.store import CentralData
from mixfed.errors import InputError
from mixfed.model import Batch, Model
from mixfed.private import PrivateStore
from mixfed.tree import Params

Metric = Callable[[Tensor, Batch], Tensor]
"""One number per example from a model's outputs and the batch; the metric is their mean."""


def accuracy(outputs: Tensor, batch: Batch) -> Tensor:
    """Whether the prediction is right: the largest logit, or a single logit above zero. Sequences: the mean."""
    labels = batch["y"]
    if outputs.shape[-1] == 1 or outputs.shape == labels.shape:
        right = (outputs.reshape(labels.shape) > 0).eq(labels > 0.5)
    else:
        right = outputs.argmax(-1).eq(labels)
    return right.float().reshape(len(labels), -1).mean(dim=1)


EXAMPLE_METRICS: dict[str, Metric] = {"accuracy": accuracy}
METRICS = ("loss", "accuracy", "auc")


def evaluator(
    model: Model,
    data: CentralData | Mapping[str, CentralData],
    metrics: Sequence[str] = ("loss", "accuracy"),
    *,
    personal: Personal | None = None,
    batch_size: int = 1024,
) -> Callable[[Params, PrivateStore], dict[str, float]]:
    """A function that evaluates parameters on the data; with several sets, each by name: ``accuracy_chat``.

    A set named "" gives plain names. With ``personal`` clients have models of their own: the metrics are the mean over
    the models of all clients that have trained so far.
    """
    for name in metrics:
        if name not in METRICS:
            raise InputError(f"There is no metric '{name}'; choose from {', '.join(METRICS)}.")
    sets = dict(data) if isinstance(data, Mapping) else {"": data}

    def evaluate(params: Params, privates: PrivateStore) -> dict[str, float]:
        models = (personal(params, p) for _, p in privates.items(CLIENTS)) if personal else iter([params])
        measured = [_measure_all(model, p, sets, metrics, batch_size) for p in models]
        measured = measured or [_measure_all(model, params, sets, metrics, batch_size)]
        return {name: float(np.mean([m[name] for m in measured])) for name in measured[0]}

    return evaluate


def _measure_all(
    model: Model, params: Params, sets: Mapping[str, CentralData], metrics: Sequence[str], batch_size: int
) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, data in sets.items():
        values = measure(model, params, data, metrics, batch_size)
        found |= {f"{metric}_{name}" if name else metric: v for metric, v in values.items()}
    return found


def measure(
    model: Model, params: Params, data: CentralData, metrics: Sequence[str], batch_size: int = 1024
) -> dict[str, float]:
    """The metrics of one model on one set, one large batch at a time."""
    weights = {n: p.to(model.dtype) for n, p in params.items()}
    totals: dict[str, float] = {}
    scores: list[NDArray[Any]] = []
    labels: list[NDArray[Any]] = []
    with torch.no_grad():
        for start in range(0, len(data), batch_size):
            batch = gather(data, np.arange(start, min(start + batch_size, len(data))), model.device)
            outputs = model.outputs(weights, batch, training=False)
            outputs = _wide(outputs) if isinstance(outputs, Tensor) else outputs
            for name in metrics:
                if name == "auc":
                    scores.append(_scores(outputs.reshape(len(batch["y"]), -1)).cpu().numpy())
                    labels.append(batch["y"].cpu().numpy())
                    continue
                values = model.criterion(outputs, batch) if name == "loss" else EXAMPLE_METRICS[name](outputs, batch)
                totals[name] = totals.get(name, 0.0) + float(values.double().sum())
    found = {name: total / len(data) for name, total in totals.items()}
    if scores:
        found["auc"] = _auc(np.concatenate(labels), np.concatenate(scores))
    return {name: found[name] for name in metrics}


def _wide(outputs: Tensor) -> Tensor:
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32)) if outputs.is_floating_point() else outputs


def _scores(outputs: Tensor) -> Tensor:
    """How much an example looks like the second class: one logit, or the difference of two."""
    if outputs.shape[1] > 2:
        raise InputError(f"AUC needs a model with one or two outputs, and this one has {outputs.shape[1]}.")
    return outputs[:, 1] - outputs[:, 0] if outputs.shape[1] == 2 else outputs[:, 0]


def _auc(labels: NDArray[Any], scores: NDArray[Any]) -> float:
    from sklearn.metrics import roc_auc_score  # here because it takes a second to import

    if not np.isfinite(scores).all():
        return float("nan")
    if len(np.unique(labels)) != 2:
        raise InputError("AUC needs an evaluation set with two labels.")
    return float(roc_auc_score(labels, scores))
