"""ResNet-18 (He et al., 2016) under torchvision's parameter names, so that its published weights load from a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from mixfed.models.photographs import IMAGENET, as_photographs
from mixfed.ranges import Count, CountOrNone, Rule, within_ranges

Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two 3×3 convolutions around which the input is carried."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """ReLU(x + two convolutions of x)."""
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + self.downsample(x))


@within_ranges(
    Rule("With GroupNorm a ResNet has an even width.", lambda norm, width: norm == "batch" or width % 2 == 0)
)
class ResNet18(nn.Module):
    """Eight blocks in four stages of 1, 2, 4 and 8 times ``width`` maps, pooled, then a linear head.

    Images of values 0 to 1, grey or in colour, are made ``resize`` pixels wide and high (0: left as they are) and
    shifted as the published weights expect. The Feddle paper takes 224 with the usual stem, which halves an image
    twice; ``stem = "small"`` (one 3×3 convolution, no pooling) is for small images as they are. Without ``outputs`` the
    network gives its 8·width features.

    BatchNorm keeps running statistics, which follow the model's policy for buffers: averaged like parameters unless
    it says otherwise. ``norm = "group"`` has no statistics at all, but cannot start from published
    weights.
    """

    def __init__(
        self,
        outputs: int,
        width: Count = 64,
        norm: Literal["batch", "group"] = "batch",
        stem: Literal["large", "small"] = "large",
        resize: CountOrNone = 0,
    ) -> None:
        super().__init__()
        make: Norm = nn.BatchNorm2d if norm == "batch" else lambda maps: nn.GroupNorm(min(32, maps // 2), maps)
        self.resize = resize
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.maxpool: nn.Module = nn.MaxPool2d(3, 2, 1)
        if stem == "small":
            self.conv1, self.maxpool = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.Identity()
        self.bn1 = make(width)
        inputs = width
        for stage in range(4):
            maps = width << stage
            blocks = nn.Sequential(Block(inputs, maps, 2 if stage else 1, make), Block(maps, maps, 1, make))
            self.add_module(f"layer{stage + 1}", blocks)
            inputs = maps
        self.fc: nn.Module = nn.Linear(inputs, outputs) if outputs else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, outputs], or the features."""
        x = as_photographs(images, self.resize, *IMAGENET)
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.fc(x.mean((-2, -1)))
        return logits
