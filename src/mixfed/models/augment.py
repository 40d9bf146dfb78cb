"""Images that are changed at random while a network trains: mirrored, or moved by some pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixfed.errors import InputError
from mixfed.models import CROP, ImageChange
from mixfed.ranges import check_range

Change = Callable[[Tensor], Tensor]


def augment(network: nn.Module, changes: Sequence[str]) -> nn.Module:
    """The network, whose images are changed before it sees them while it trains, and left alone in evaluation.

    A change is ``"flip"`` (left and right are exchanged, with probability ½) or ``"crop 4"`` (the image gets an edge of
    4 zeros, and a piece of its size is cut out at random). The numbers are drawn like all random numbers of a network.
    """
    made = [_change(name) for name in changes]

    def change(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        images, *others = given
        if not module.training:
            return given
        if not isinstance(images, Tensor) or images.ndim != 4:
            raise InputError(
                "Only a batch of images can be mirrored or moved at random, and the network is given something else."
            )
        for apply in made:
            images = apply(images)
        return (images, *others)

    if made:
        network.register_forward_pre_hook(change)
    return network


def _change(name: str) -> Change:
    check_range(name, ImageChange, "A change of images")
    crop = CROP.fullmatch(name)
    return flip if crop is None else partial(shift, pixels=int(crop[1]))


def flip(images: Tensor) -> Tensor:
    """Every image as it is or mirrored, one or the other with probability ½."""
    mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(mirrored, images.flip(-1), images)


def shift(images: Tensor, pixels: int) -> Tensor:
    """Every image moved up or down and to a side, by up to so many pixels; what comes in is zero."""
    wide = F.pad(images, (pixels,) * 4)
    for side in (-2, -1):
        length = images.shape[side]
        first = torch.randint(0, 2 * pixels + 1, (len(images), 1), device=images.device)
        places = first + torch.arange(length, device=images.device)
        index = places[:, None, :, None] if side == -2 else places[:, None, None, :]
        shape = list(wide.shape)
        shape[side] = length
        wide = wide.gather(side, index.expand(shape))
    return wide
