"""Whether a model, its criterion and the examples go together, found out before a long run does.

The network is asked about one example; labels are cheap, so all of them are looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.core.batches import gather
from mixfed.core.losses import binary_cross_entropy, cross_entropy, hinge, squared_error
from mixfed.core.model import Model
from mixfed.core.soundness import client_of
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError, in_own_code

Rows = NDArray[np.int64]
SAMPLE = 16
"""So many examples tell whether batches have the labels as they are stored."""


@dataclass(frozen=True)
class Labels:
    """All labels of a set of examples, and the words by which sentences call them."""

    values: NDArray[Any]
    data: FederatedData | CentralData
    whose: str

    def holder(self, wrong: NDArray[np.bool_]) -> str:
        """Which client has the first of these labels, where the examples are of clients."""
        client = client_of(self.data, int(np.argmax(wrong.reshape(len(wrong), -1).any(axis=1))))
        return f" (see {client})" if client else ""


def check_compatible(model: Model, data: FederatedData | CentralData, whose: str, readers: str = "") -> None:
    """Refuses examples whose shape the network does not take, and labels that the criterion has no meaning for.

    Where the examples are texts, ``readers`` are the networks that read such.
    """
    if not data.examples:
        raise InputError(f"{whose[0].upper()}{whose[1:]} are empty; give at least one example.")
    rows = np.unique(np.linspace(0, data.examples - 1, SAMPLE).astype(np.int64))
    some = gather(data, rows, model.device)
    one = {name: x[:1] for name, x in some.items()}
    weights = {name: x.to(model.dtype) for name, x in model.initial().items()}
    check = TARGETS.get(inspect.unwrap(model.criterion))
    failing = "The model does not take"
    try:
        with torch.no_grad():
            outputs = model.outputs(weights, one, training=False)
            failing = "The criterion fails on"
            if check and not isinstance(outputs, Tensor):
                told = type(outputs).__name__
                raise InputError(f"The network answers with a {told}, and the criterion needs a tensor; return one.")
            if check:
                check(outputs, _labels(data, rows, some, model.device, whose))
            model.losses(weights, one, training=False)
    except InputError:
        raise
    except KeyError as error:
        raise InputError(
            f"The model asks for a field {error}, and {whose} have {_listed(some)}; give them this field, or rename the"
            " one that is meant."
        ) from error
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError, NameError) as error:
        raise InputError(_refused(error, model, one, whose, readers, failing)) from error


def _refused(error: Exception, model: Model, one: Batch, whose: str, readers: str, failing: str) -> str:
    """Why the network does not take examples, for which a type of numbers that it does not compute with is a reason."""
    told = " ".join(str(error).split()).rstrip(".")
    inputs = {name: x.dtype for name, x in one.items() if name not in ("y", "key") and x.dtype != torch.float32}
    of_type = any(word in told for word in ("dtype", "scalar type"))
    if readers and "x" in inputs:
        why = "" if of_type else f" ({told}{in_own_code(error)})"
        return (
            f"The field 'x' of {whose} is text, as the numbers of its characters or tokens, which the network does not"
            f" read{why}; choose {readers}, or begin a network of your own with torch.nn.Embedding."
        )
    if inputs and of_type:
        name, dtype = next(iter(inputs.items()))
        wanted = str(model.dtype).removeprefix("torch.")
        return (
            f"The field '{name}' of {whose} is {str(dtype).removeprefix('torch.')}, and the model computes in {wanted};"
            f" convert it with .astype('{wanted}'), or in a prepare function."
        )
    shapes = ", ".join(f"{name} {list(x.shape[1:])}" for name, x in one.items())
    return f"{failing} {whose} (of shapes {shapes}): {told}{in_own_code(error)}."


def _listed(some: Batch) -> str:
    return ", ".join(f"'{name}'" for name in some if name != "key")


def _labels(
    data: FederatedData | CentralData, rows: Rows, some: Batch, device: torch.device | str, whose: str
) -> Labels:
    """All labels as batches have them: the stored ones, or what preparation makes of them where it does."""
    if "y" not in some:
        raise InputError(
            f"The criterion needs labels 'y', and {whose} have {_listed(some)}; name the field of the labels 'y'."
        )
    stored = data.arrays.get("y")
    if stored is not None and np.array_equal(stored[rows], some["y"].cpu().numpy()):
        return Labels(stored, data, whose)
    starts = range(0, data.examples, 1024)
    parts = (gather(data, np.arange(s, min(s + 1024, data.examples)), device)["y"] for s in starts)
    return Labels(np.concatenate([part.cpu().numpy() for part in parts]), data, whose)


def _classes(outputs: Tensor, labels: Labels) -> None:
    if outputs.ndim not in (2, 3):
        told = ", ".join(["batch", *map(str, outputs.shape[1:])])
        raise InputError(
            f"Cross-entropy needs outputs [batch, classes] or [batch, length, classes], not those of shape [{told}]."
        )
    if labels.values.shape[1:] != outputs.shape[1:-1]:
        shape = list(labels.values.shape[1:])
        raise InputError(
            f"Cross-entropy needs a class number for each {'position' if outputs.ndim == 3 else 'example'}, and the"
            f" labels 'y' of {labels.whose} have the shape {shape} each; {_other_labels(outputs, shape)}."
        )
    _whole(labels)
    _between(labels, outputs.shape[-1] - 1, "the model has outputs for")


def _other_labels(outputs: Tensor, shape: list[int]) -> str:
    """What to do about labels of this shape, or about a network that does not answer where they are."""
    if shape == [1]:
        return "take y[:, 0]"
    if outputs.ndim == 3 and not shape:
        return "take a network with one answer for each example"
    if outputs.ndim == 2 and len(shape) == 1 and shape[0] != outputs.shape[1]:
        return "give one label, or take a network with an answer at each position"
    return "of one-hot labels take the argmax"


def _items(outputs: Tensor, labels: Labels) -> None:
    """An item that the model lacks is told where it is looked up, with the client that has it."""
    if labels.values.ndim != 1:
        raise InputError(
            f"The hinge loss needs the id of one item for each example, and those of {labels.whose} have more."
        )
    _whole(labels)


def _yes_or_no(outputs: Tensor, labels: Labels) -> None:
    if outputs[0].numel() != 1 or labels.values[0].size != 1:
        raise InputError(
            f"Binary cross-entropy needs one output and one label for each example; the model has"
            f" {outputs[0].numel()} outputs, and the labels of {labels.whose} have {labels.values[0].size} numbers."
        )
    _whole(labels)
    _between(labels, 1, "binary cross-entropy knows", "; use cross_entropy for more classes")


def _numbers(outputs: Tensor, labels: Labels) -> None:
    answered, wanted = ([size for size in shape[1:] if size != 1] for shape in (outputs.shape, labels.values.shape))
    if answered != wanted:
        raise InputError(
            f"Squared error needs an output for every number of a label; the model's outputs have the shape"
            f" {list(outputs.shape[1:])}, and the labels of {labels.whose} {list(labels.values.shape[1:])}."
        )
    if not np.isfinite(labels.values).all():
        raise InputError(f"Some labels of {labels.whose} are not finite; drop these examples.")


TARGETS: dict[Any, Callable[[Tensor, Labels], None]] = {
    cross_entropy: _classes,
    binary_cross_entropy: _yes_or_no,
    squared_error: _numbers,
    hinge: _items,
}
"""What each criterion asks of all labels, given the outputs for one example."""


def _whole(labels: Labels) -> None:
    values = labels.values
    if values.dtype.kind in "biu":
        return
    wrong = values != np.rint(values)
    if values.dtype.kind != "f" or wrong.any():
        raise InputError(
            f"The labels 'y' of {labels.whose} are {values.dtype} with fractions{labels.holder(wrong)}; give whole"
            " numbers, or train with squared_error where they are measurements."
        )


def _between(labels: Labels, highest: int, known: str, way_out: str = "") -> None:
    values = labels.values
    low, high = int(values.min()), int(values.max())
    if low >= 0 and high <= highest:
        return
    if not way_out:
        shifted = low == 1 and high == highest + 1
        mend = "subtract 1 from them" if shifted else f"number them from 0, or give the model {high + 1} outputs"
        way_out = f" only; {mend}"
    holder = labels.holder((values < 0) | (values > highest))
    raise InputError(
        f"The labels 'y' of {labels.whose} go from {low} to {high}, and {known} 0 to {highest}{way_out}{holder}."
    )
