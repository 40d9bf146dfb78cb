"""Metrics of classes, which need all answers in one place: F1, calibration, and the accuracy of every class.

torchmetrics computes them. Here the answers of a model are brought into the form that it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.data.meaning import Meaning
from mixfed.errors import InputError, from_extra

BINS = 15


def f1(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The mean over classes of the harmonic mean of precision and recall (macro F1)."""
    found = _torchmetrics().multiclass_f1_score(logits, labels, num_classes=logits.shape[1], average="macro")
    return {"f1": float(found)}


def calibration_error(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The expected calibration error: |confidence − accuracy|, the mean over 15 bins of confidence by their size."""
    found = _torchmetrics().multiclass_calibration_error(logits.softmax(1), labels, logits.shape[1], n_bins=BINS)
    return {"calibration_error": float(found)}


def class_accuracy(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The accuracy on the examples of every class by itself, by its number; not a number where it has none."""
    right = logits.argmax(1).eq(labels).double()
    sums = torch.zeros(logits.shape[1], dtype=torch.float64).index_add_(0, labels, right)
    counts = torch.bincount(labels, minlength=logits.shape[1])
    return {str(i): float(x) for i, x in enumerate(sums / counts)}


CLASS_METRICS: dict[str, Callable[[Tensor, Tensor], dict[str, float]]] = {
    "f1": f1,
    "calibration_error": calibration_error,
    "class_accuracy": class_accuracy,
}


def as_logits(outputs: Tensor, labels: Tensor) -> dict[str, NDArray[Any]]:
    """Outputs as one logit for each class, and labels as one number each; positions of sequences are examples."""
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise InputError("F1, calibration and the accuracy of classes are for labels that are classes.")
    if outputs.shape[-1] == 1 or outputs.shape == labels.shape:
        one = outputs.reshape(-1)
        outputs = torch.stack([torch.zeros_like(one), one], 1)
    flat = outputs.reshape(-1, outputs.shape[-1])
    return {"logits": flat.float().cpu().numpy(), "classes": labels.reshape(-1).long().cpu().numpy()}


def measured(names: list[str], arrays: Mapping[str, NDArray[Any]], meaning: Meaning) -> dict[str, dict[str, float]]:
    """By metric what it found, which may be several numbers with names of their own: ``class_accuracy.owl``."""
    logits, labels = torch.from_numpy(arrays["logits"]), torch.from_numpy(arrays["classes"])
    finite = bool(torch.isfinite(logits).all())
    found = {name: CLASS_METRICS[name](logits.nan_to_num(), labels) for name in names}
    if "class_accuracy" in found:
        by_number = found["class_accuracy"]
        found["class_accuracy"] = {f"class_accuracy.{meaning.name(int(n))}": x for n, x in by_number.items()}
    return found if finite else {name: dict.fromkeys(values, float(np.nan)) for name, values in found.items()}


def _torchmetrics() -> Any:
    return from_extra("torchmetrics.functional.classification", "metrics", "F1 or calibration")
