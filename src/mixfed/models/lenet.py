"""LeNet-5 as in LG-FedAvg: two convolutions with 2,872 parameters, which are global, and three dense layers."""

from __future__ import annotations

from torch import nn


def lenet5(channels: int, size: int, outputs: int) -> nn.Module:
    """5×5 convolutions with 6 and 16 maps, each pooled, then 120, 100 and the outputs, for square images.

    For 32×32 colour images and 10 classes it has 64,102 parameters, as in the paper.
    """
    side = ((size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 100),
        nn.ReLU(),
        nn.Linear(100, outputs),
    )
