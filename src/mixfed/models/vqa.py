"""Visual question answering with two encoders and early fusion (Liang et al., 2020, C.2.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mixfed.model import Batch


class Block(nn.Module):
    """Two 3×3 convolutions around which the input is carried."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.carry: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.carry = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """ReLU(x + two convolutions of x)."""
        inner = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(inner + self.carry(x))


def resnet18(width: int = 64) -> nn.Module:
    """ResNet-18 up to its pooled features (8·width numbers); 64 is the usual width."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for stage in range(4):
        outputs = width << stage
        layers += [Block(inputs, outputs, 2 if stage else 1), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class QuestionAnswering(nn.Module):
    """``image.`` (ResNet-18) and ``question.`` (an LSTM of two layers) are local representations.

    The final dense layers of both channels and the two after their product (``head.``) are global.
    """

    takes_batch = True

    def __init__(
        self, outputs: int, words: int = 10000, embedding: int = 300, width: int = 64, fused: int = 1024
    ) -> None:
        super().__init__()
        self.image = resnet18(width)
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
