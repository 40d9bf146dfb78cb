"""Using a trained model: what it answers to examples that have no labels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.core import tree
from mixfed.core.batches import gather
from mixfed.core.layout import channels_last
from mixfed.core.losses import binary_cross_entropy, cross_entropy, hinge, squared_error
from mixfed.core.model import Model
from mixfed.core.tree import Params
from mixfed.data.batch import Batch, Criterion
from mixfed.data.meaning import Meaning
from mixfed.data.store import CentralData
from mixfed.errors import InputError, explained

OF_IMAGES = 128
"""Convolutions answer so many examples at a time at most: what lies between their layers then stays in the cache."""


def predict(
    model: Model, params: Params, inputs: Any, *, raw: bool = False, batch_size: int = 1024
) -> Tensor | NDArray[np.str_]:
    """What the model answers to each example: a class, by its name if it has one, or a measurement in its own unit.

    ``inputs`` is an array of examples (the field "x") as the network takes them, a mapping of fields, or
    :class:`CentralData`. With ``raw`` the answers are the outputs of the network.
    """
    data = as_data(inputs)
    if not len(data):
        raise InputError("There are no examples to answer; give at least one.")
    outputs = torch.cat([answer for _, answer in answers(model, params, data, batch_size)])
    return outputs if raw else meant(outputs, model.criterion, model.meaning)


def answers(model: Model, params: Params, data: CentralData, batch_size: int = 1024) -> Iterator[tuple[Batch, Any]]:
    """The batches of a set in order, each with the model's outputs in 32 bits at least."""
    weights = channels_last(tree.cast(params, model.dtype))
    if any(x.ndim == 4 for x in weights.values()):
        batch_size = min(batch_size, OF_IMAGES)
    for start in range(0, len(data), batch_size):
        batch = gather(data, np.arange(start, min(start + batch_size, len(data))), model.device)
        with explained("The model cannot answer"):
            outputs = answer(model, weights, batch)
        yield batch, outputs


def answer(model: Model, weights: Params, batch: Batch) -> Any:
    """The outputs for one batch, in 32 bits at least, with weights in the model's precision."""
    with torch.no_grad():
        outputs = model.outputs(weights, batch, training=False)
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        return outputs
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def meant(outputs: Tensor, criterion: Criterion | None, meaning: Meaning) -> Tensor | NDArray[np.str_]:
    """What outputs stand for: classes, by their names where these are known, or measurements in their own unit."""
    found = classes(outputs, criterion, meaning)
    return meaning.measured(outputs) if found is None else meaning.named(found)


def classes(outputs: Tensor, criterion: Criterion | None, meaning: Meaning) -> Tensor | None:
    """The numbers of the classes that outputs stand for; None where they stand for none.

    The class is the largest output, or of a single logit whether it is above 0. A criterion of the user's own (None, if
    it is not at hand) may be of anything; where there is an output for each of the classes, the answer is the largest
    too, as accuracy has it.
    """
    kind = inspect.unwrap(criterion) if criterion else None
    if kind is binary_cross_entropy:
        return (outputs.reshape(len(outputs)) > 0).long()
    own = kind not in (cross_entropy, squared_error, hinge)
    if kind is cross_entropy or (own and 1 < outputs.shape[-1] == meaning.classes):
        return outputs.argmax(-1)
    return None


def as_data(inputs: Any) -> CentralData:
    """Inputs as data without labels."""
    if isinstance(inputs, CentralData):
        return inputs
    fields = inputs if isinstance(inputs, Mapping) else {"x": inputs}
    return CentralData.from_arrays({name: np.asarray(x) for name, x in fields.items()})
