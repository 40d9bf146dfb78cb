"""Visual question answering with two encoders and early fusion (Liang et al., 2020, C.2.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mixfed.data.batch import Batch
from mixfed.models.resnet import ResNet18
from mixfed.ranges import Count, within_ranges


@within_ranges()
class QuestionAnswering(nn.Module):
    """``image.`` (ResNet-18) and ``question.`` (an LSTM of two layers) are local representations.

    The final dense layers of both channels and the two after their product (``head.``) are global.
    """

    takes_batch = True

    def __init__(
        self, outputs: int, words: Count = 10000, embedding: Count = 300, width: Count = 64, fused: Count = 1024
    ) -> None:
        super().__init__()
        self.image = ResNet18(0, width)
        self.question = nn.ModuleDict(
            {
                "embedding": nn.Embedding(words, embedding),
                "lstm": nn.LSTM(embedding, 8 * width, num_layers=2, batch_first=True),
            }
        )
        self.head = nn.ModuleDict(
            {
                "image": nn.Linear(8 * width, fused),
                "question": nn.Linear(4 * 8 * width, fused),
                "dense": nn.Linear(fused, outputs),
                "last": nn.Linear(outputs, outputs),
            }
        )

    def forward(self, batch: Batch) -> Tensor:
        """Logits over answers; the two channels meet in an element-wise product."""
        seen = torch.tanh(self.head["image"](self.image(batch["x"])))
        embedded = torch.tanh(self.question["embedding"](batch["question"].long()))
        _, (state, memory) = self.question["lstm"](embedded)
        heard = torch.cat([*state, *memory], dim=-1)
        fused = seen * torch.tanh(self.head["question"](heard))
        logits: Tensor = self.head["last"](torch.tanh(self.head["dense"](fused)))
        return logits
