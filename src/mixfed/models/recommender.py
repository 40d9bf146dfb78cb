"""A dual encoder for next-movie prediction (Ning et al., 2021; Augenstein et al., 2022, section 5.3)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixfed.models.bags import bag
from mixfed.ranges import Count, within_ranges


@within_ranges()
class DualEncoder(nn.Module):
    """Two towers over one table E [N, d] of item embeddings, compared by the cosine of their ends.

    Left: l = relu(A·mean(E[i] for the items i seen) + b), a bag of words with a hidden layer. Right: r = E[j], the
    lookup of an item j. The score of j is cos(l, r). Ids of -1 are padding.
    """

    tables: ClassVar = {"embedding.weight": ("x", "y")}

    def __init__(self, items: int, width: Count = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(items, width)
        self.hidden = nn.Linear(width, width)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        nn.init.xavier_uniform_(self.hidden.weight)
        nn.init.zeros_(self.hidden.bias)

    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        """In training the score of the item that followed, [batch]; else the scores of all items, [batch, N]."""
        known = (seen >= 0).to(self.embedding.weight.dtype)
        left = F.relu(self.hidden(bag(seen, self.embedding.weight) / known.sum(-1, keepdim=True).clamp(min=1)))
        if self.training:
            return cosine(left, self.embedding(following))
        scores: Tensor = unit(left) @ unit(self.embedding.weight).T
        return scores

    def on_batch(self, batch: dict[str, Tensor]) -> Tensor:
        """The scores of a batch: ``x`` are the items seen, ``y`` is the one that followed."""
        scores: Tensor = self(batch["x"], batch["y"])
        return scores


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """x·y/(‖x‖·‖y‖) along the last dimension; that of a vector of nothing is 0."""
    return (x * y).sum(-1) * torch.rsqrt(_square(x) * _square(y))


def unit(x: Tensor) -> Tensor:
    """x/‖x‖ along the last dimension; a vector of nothing stays nothing."""
    return x * torch.rsqrt(_square(x)[..., None])


def _square(x: Tensor) -> Tensor:
    return x.square().sum(-1).clamp(min=1e-12)
