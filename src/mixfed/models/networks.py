"""The networks of the papers, as plain modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mixfed.errors import InputError


def linear(inputs: int, outputs: int) -> nn.Module:
    """Logistic regression: one linear layer on flattened inputs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


def mlp(inputs: int, outputs: int, hidden: Sequence[int] = (64,), dropout: float = 0.0) -> nn.Module:
    """A multilayer perceptron with ReLU on flattened inputs (Augenstein et al., 2022: one hidden layer of 64)."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = inputs
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        if dropout:
            layers.append(_dropout(dropout))
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def cnn(
    channels: int,
    size: int,
    outputs: int,
    widths: Sequence[int] = (32, 64),
    dense: int = 128,
    dropout: float = 0.0,
    pool_after: int = 0,
) -> nn.Module:
    """3×3 convolutions with ReLU, one 2×2 pooling, a dense layer and a head, for square images.

    The pooling comes after the last convolution, or after the first ``pool_after``, which leaves the others less work.
    """
    if not 0 <= pool_after <= len(widths):
        raise InputError(f"The pooling cannot come after convolution {pool_after} of {len(widths)}.")
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
        layers.append(_dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(channels * size**2, dense), nn.ReLU(), nn.Linear(dense, outputs))


def _dropout(share: float) -> nn.Module:
    if not 0 <= share < 1:
        raise InputError(f"Dropout leaves out a share of at least 0 and below 1, not {share}.")
    return nn.Dropout(share)


class CharacterGRU(nn.Module):
    """Next-character prediction: embedding, one GRU layer, a linear head over the vocabulary."""

    def __init__(self, vocabulary: int, embedding: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.gru = nn.GRU(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] for the character after each position."""
        hidden, _ = self.gru(self.embedding(characters.to(torch.long)))
        logits: Tensor = self.head(hidden)
        return logits
