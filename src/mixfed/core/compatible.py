"""Whether a model, its criterion and the examples go together, found out before a long run does.

The network is asked about one example; labels are cheap, so all of them are looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.core.batches import gather
from mixfed.core.losses import binary_cross_entropy, cross_entropy, hinge, squared_error
from mixfed.core.model import Model
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError

Labels = NDArray[Any]
Rows = NDArray[np.int64]
SAMPLE = 16
"""So many examples tell whether batches have the labels as they are stored."""


def check_compatible(model: Model, data: FederatedData | CentralData, whose: str) -> None:
    """Refuses examples whose shape the network does not take, and labels that the criterion has no meaning for."""
    if not data.examples:
        raise InputError(f"There are no examples in {whose}.")
    rows = np.unique(np.linspace(0, data.examples - 1, SAMPLE).astype(np.int64))
    some = gather(data, rows, model.device)
    one = {name: x[:1] for name, x in some.items()}
    shapes = ", ".join(f"{name} {list(x.shape[1:])}" for name, x in one.items())
    weights = {name: x.to(model.dtype) for name, x in model.initial().items()}
    check = TARGETS.get(inspect.unwrap(model.criterion))
    try:
        with torch.no_grad():
            outputs = model.outputs(weights, one, training=False)
            if check:
                check(outputs, _labels(data, rows, some, model.device, whose), whose)
            model.losses(weights, one, training=False)
    except InputError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError) as error:
        told = " ".join(str(error).split()).rstrip(".")
        raise InputError(f"The model does not take {whose} (of shapes {shapes}): {told}.") from error


def _labels(
    data: FederatedData | CentralData, rows: Rows, some: Batch, device: torch.device | str, whose: str
) -> Labels:
    """All labels as batches have them: the stored ones, or what preparation makes of them where it does."""
    if "y" not in some:
        raise InputError(f"The criterion needs labels 'y', and {whose} have {', '.join(some)}.")
    stored = data.arrays.get("y")
    if stored is not None and np.array_equal(stored[rows], some["y"].cpu().numpy()):
        return stored
    starts = range(0, data.examples, 1024)
    parts = (gather(data, np.arange(s, min(s + 1024, data.examples)), device)["y"] for s in starts)
    return np.concatenate([part.cpu().numpy() for part in parts])


def _classes(outputs: Tensor, labels: Labels, whose: str) -> None:
    if outputs.ndim not in (2, 3):
        told = ", ".join(["batch", *map(str, outputs.shape[1:])])
        raise InputError(
            f"Cross-entropy needs outputs [batch, classes] or [batch, length, classes], not those of shape [{told}]."
        )
    if labels.shape[1:] != outputs.shape[1:-1]:
        raise InputError(
            f"Cross-entropy needs a class number for each {'position' if outputs.ndim == 3 else 'example'}, and the"
            f" labels of {whose} have the shape {list(labels.shape[1:])} each; of one-hot labels take the argmax."
        )
    _whole(labels, whose)
    _between(labels, outputs.shape[-1] - 1, whose, "the model has outputs for")


def _items(outputs: Tensor, labels: Labels, whose: str) -> None:
    """An item that the model lacks is told where it is looked up, with the client that has it."""
    if labels.ndim != 1:
        raise InputError(f"The hinge loss needs the id of one item for each example, and those of {whose} have more.")
    _whole(labels, whose)


def _yes_or_no(outputs: Tensor, labels: Labels, whose: str) -> None:
    if outputs[0].numel() != 1 or labels[0].size != 1:
        raise InputError(
            f"Binary cross-entropy needs one output and one label for each example; the model has"
            f" {outputs[0].numel()} outputs, and the labels of {whose} have {labels[0].size} numbers."
        )
    _whole(labels, whose)
    _between(labels, 1, whose, "binary cross-entropy knows", "; use cross_entropy for more classes")


def _numbers(outputs: Tensor, labels: Labels, whose: str) -> None:
    answered, wanted = ([size for size in shape[1:] if size != 1] for shape in (outputs.shape, labels.shape))
    if answered != wanted:
        raise InputError(
            f"Squared error needs an output for every number of a label; the model's outputs have the shape"
            f" {list(outputs.shape[1:])}, and the labels of {whose} {list(labels.shape[1:])}."
        )
    if not np.isfinite(labels).all():
        raise InputError(f"Some labels of {whose} are not finite; drop these examples.")


TARGETS: dict[Any, Callable[[Tensor, Labels, str], None]] = {
    cross_entropy: _classes,
    binary_cross_entropy: _yes_or_no,
    squared_error: _numbers,
    hinge: _items,
}
"""What each criterion asks of all labels, given the outputs for one example."""


def _whole(labels: Labels, whose: str) -> None:
    if labels.dtype.kind not in "biu" and not (labels.dtype.kind == "f" and (labels == np.rint(labels)).all()):
        raise InputError(f"The labels of {whose} are {labels.dtype} with fractions; give whole numbers.")


def _between(labels: Labels, highest: int, whose: str, known: str, way_out: str = " only") -> None:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high > highest:
        raise InputError(f"The labels of {whose} go from {low} to {high}, and {known} 0 to {highest}{way_out}.")
