"""Criteria: one loss per example from a model's outputs and the batch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mixfed.data.batch import Batch
from mixfed.errors import InputError

MARGIN = 0.9


def cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    """−log softmax(outputs)_y; for sequences (outputs [batch, length, classes]) the mean over positions."""
    labels = batch["y"].long()
    if outputs.ndim == 2:
        return F.cross_entropy(outputs, labels, reduction="none")
    values = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none")
    return values.view(labels.shape).mean(dim=1)


def binary_cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of one logit against y ∈ {0, 1}."""
    logits = outputs.reshape(len(outputs))
    labels = batch["y"].reshape(len(outputs)).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def squared_error(outputs: Tensor, batch: Batch) -> Tensor:
    """½(outputs − y)², summed over the output's dimensions."""
    difference = outputs - batch["y"].reshape(outputs.shape).to(outputs.dtype)
    return 0.5 * difference.square().flatten(1).sum(dim=1)


def hinge(outputs: Tensor, batch: Batch) -> Tensor:
    """max(0, 0.9 − score of the item that followed)²; outputs are that score, or the scores of all items."""
    scores = outputs if outputs.ndim == 1 else of_following(outputs, batch)[:, 0]
    return (MARGIN - scores).clamp(min=0).square()


def of_following(outputs: Tensor, batch: Batch) -> Tensor:
    """Of the scores of all items that of the one that followed, [batch, 1]."""
    ids = batch["y"].long()[:, None]
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= outputs.shape[1]):
        wrong = ids[(ids < 0) | (ids >= outputs.shape[1])][0]
        raise InputError(
            f"An example has the label {int(wrong)}, and the model scores the items 0 to {outputs.shape[1] - 1} only."
        )
    return outputs.gather(1, ids)
