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
    if outputs.ndim != 2:
        raise InputError("Recall needs the scores of all items, shape [batch, items].")
    score, places = of_following(outputs, batch), torch.empty(len(outputs), dtype=torch.int64, device=outputs.device)
    for start in range(0, len(outputs), PIECE):
        some = slice(start, start + PIECE)
        _place(outputs[some], score[some], batch["y"][some].long()[:, None], places[some])
    return torch.where(score[:, 0].isfinite(), places, torch.iinfo(places.dtype).max)


PIECE = 64
"""So many examples are compared at a time: their scores stay in the cache."""


def _place(outputs: Tensor, score: Tensor, ids: Tensor, places: Tensor) -> None:
    """Writes the places of some examples. Truths become numbers, because PyTorch adds those up faster; 32 bits count
    exactly, 16 do not."""
    room = torch.empty_like(outputs, dtype=torch.promote_types(outputs.dtype, torch.float32))
    after = torch.empty_like(places)
    after.copy_(torch.lt(outputs, score, out=room).sum(1))
    if bool(torch.le(outputs, score, out=room).sum(1).sub_(after).eq(1).all()):  # no other item has the same score
        after += 1
    else:
        level = (outputs == score) & (torch.arange(outputs.shape[1], device=outputs.device) >= ids)
        after += level.sum(1)
    torch.sub(outputs.shape[1], after, out=places)


@dataclass(frozen=True)
class Recall:
    """recall@k: whether the item that followed is among the k of highest score, of all items."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"Recall is of the first 1 or more items, not of {self.k}.")

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self.among(rank(outputs, batch))

    def among(self, ranks: Tensor) -> Tensor:
        """The same of ranks, which several metrics may share."""
        return (ranks < self.k).float()
