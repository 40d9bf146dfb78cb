"""The networks of the papers, as plain modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mixfed.errors import InputError
from mixfed.ranges import Count, CountOrNone, PartOfOne, Rule, within_ranges


def linear(inputs: int, outputs: int) -> nn.Module:
    """Logistic regression: one linear layer on flattened inputs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


@within_ranges()
def mlp(inputs: int, outputs: int, hidden: Sequence[Count] = (64,), dropout: PartOfOne = 0.0) -> nn.Module:
    """A multilayer perceptron with ReLU on flattened inputs (Augenstein et al., 2022: one hidden layer of 64)."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = inputs
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


@within_ranges(
    Rule(
        "The pooling comes after one of the convolutions; there are not so many as pool_after says.",
        lambda pool_after, widths: pool_after <= len(widths),
    )
)
def cnn(
    channels: int,
    size: int,
    outputs: int,
    widths: Sequence[Count] = (32, 64),
    dense: Count = 128,
    dropout: PartOfOne = 0.0,
    pool_after: CountOrNone = 0,
) -> nn.Module:
    """3×3 convolutions with ReLU, one 2×2 pooling, a dense layer and a head, for square images.

    The pooling comes after the last convolution, or after the first ``pool_after``, which leaves the others less work.
    """
    layers: list[nn.Module] = []
    for number, width in enumerate(widths, 1):
        layers += [nn.Conv2d(channels, width, 3), nn.ReLU()]
        channels, size = width, size - 2
        if number == (pool_after or len(widths)):
            layers.append(nn.MaxPool2d(2))
            size //= 2
    if size < 1:
        raise InputError("The images are too small for this many convolutions.")
    layers.append(nn.Flatten())
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(channels * size**2, dense), nn.ReLU(), nn.Linear(dense, outputs))


@within_ranges()
class CharacterGRU(nn.Module):
    """Next-character prediction: embedding, one GRU layer, a linear head over the vocabulary."""

    def __init__(self, vocabulary: int, embedding: Count = 64, hidden: Count = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.gru = nn.GRU(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] for the character after each position."""
        hidden, _ = self.gru(self.embedding(characters.to(torch.long)))
        logits: Tensor = self.head(hidden)
        return logits
