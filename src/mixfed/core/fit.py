"""Whether a model and its examples go together, found out on one example before a long run does."""

from __future__ import annotations

import numpy as np
import torch

from mixfed.core.batches import gather
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError


def check_fit(model: Model, data: FederatedData | CentralData, whose: str) -> None:
    """Refuses examples whose shape the network or the criterion does not take, and labels that it has no output for."""
    if not data.examples:
        raise InputError(f"There are no examples in {whose}.")
    batch = gather(data, np.zeros(1, np.int64), model.device)
    shapes = ", ".join(f"{name} {list(x.shape[1:])}" for name, x in batch.items())
    weights = {name: x.to(model.dtype) for name, x in model.initial().items()}
    try:
        with torch.no_grad():
            outputs = model.outputs(weights, batch, training=False)
            if model.criterion is cross_entropy:
                _check_labels(outputs.shape[-1], data, whose)
            model.losses(weights, batch, training=False)
    except InputError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError) as error:
        told = " ".join(str(error).split()).rstrip(".")
        raise InputError(f"The model does not take {whose} (of shapes {shapes}): {told}.") from error


def _check_labels(classes: int, data: FederatedData | CentralData, whose: str) -> None:
    if "y" not in data.arrays:
        raise InputError(f"Cross-entropy needs labels 'y', and {whose} have {', '.join(data.arrays)}.")
    labels = data.arrays["y"]
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise InputError(
            f"The labels of {whose} go from {low} to {high}, and the model has outputs for 0 to {classes - 1} only."
        )
