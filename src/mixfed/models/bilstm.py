"""Personal text classification: a Bi-LSTM over characters, and a classifier on top (Liang et al., 2020, C.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mixfed.models.networks import mlp
from mixfed.ranges import Count, within_ranges


@within_ranges()
class BiLSTM(nn.Module):
    """Embedding and Bi-LSTM are the representation (``embedding.``, ``lstm.``), the MLP ``head.`` is on top of it.

    Number 0 pads texts; the representation is the mean over the characters that are there.
    """

    def __init__(
        self,
        outputs: int,
        characters: Count = 97,
        embedding: Count = 32,
        width: Count = 128,
        dense: Sequence[Count] = (512, 512),
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, width, batch_first=True, bidirectional=True)
        self.head = mlp(2 * width, outputs, dense)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits [batch, outputs]."""
        there = (characters != 0).unsqueeze(-1).float()
        hidden, _ = self.lstm(self.embedding(characters.to(torch.long)))
        mean = (hidden * there).sum(1) / there.sum(1).clamp(min=1)
        logits: Tensor = self.head(mean)
        return logits
