"""Where the item that followed stands among all items: ranks and recall@k."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mixfed.core.losses import of_following
from mixfed.data.batch import Batch
from mixfed.errors import InputError


def rank(outputs: Tensor, batch: Batch) -> Tensor:
    """The place of the item that followed, counted from 0: how many items stand before it.

    An item stands before it, unless its score is lower, or its score is the same and its id is higher. So an item whose
    score is NaN stands before it. If the score of the item that followed is not finite, it has the last place of all.
    """
    score, ids = of_following(outputs, batch), batch["y"].long()[:, None]
    level = (outputs == score) & (torch.arange(outputs.shape[1], device=outputs.device) >= ids)
    places = ((outputs < score) | level).sum(1).neg() + outputs.shape[1]
    return torch.where(score[:, 0].isfinite(), places, torch.iinfo(places.dtype).max)


@dataclass(frozen=True)
class Recall:
    """recall@k: whether the item that followed is among the k of highest score, of all items."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"Recall is of the first 1 or more items, not of {self.k}.")

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        if outputs.ndim != 2:
            raise InputError(f"recall@{self.k} needs the scores of all items, shape [batch, items].")
        return (rank(outputs, batch) < self.k).float()
