"""Parts of a network, one after the other, as a network of its own: what is run once apart from what is trained."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mixfed.errors import InputError
from mixfed.models.photographs import IMAGENET, as_photographs

_SLICE = re.compile(r"(.+)\[(\d*):(\d*)\]")
_PHOTOGRAPHS = re.compile(r"photographs(?: (\d+))?")

WORDS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "mean": partial(torch.mean, dim=(-2, -1)),
    "flatten": partial(torch.flatten, start_dim=1),
}
"""What a network does between its parts; "mean" is over the places of an image."""


class Chain(nn.Module):
    """The parts that ``steps`` name, each applied to what the one before gave.

    A step is the name of a part (``"layer1"``, ``"blocks.3"``), some parts of a list of them (``"blocks[:15]"``), one
    of :data:`WORDS`, or ``"photographs 64"``: images of values 0 to 1 are made 64 pixels wide and high (without a
    number: left as large as they are), less ImageNet's mean colour, over its deviation. Parameters keep the names that
    they have in the network; those of parts that no step names are left out.
    """

    def __init__(self, network: nn.Module, steps: Sequence[str]) -> None:
        super().__init__()
        self.steps = tuple(name for step in steps for name in _expanded(network, step))
        if not self.steps:
            raise InputError("A chain of parts of a network needs at least one part.")
        parts = dict(network.named_modules())
        self.words = {name: _word(name) for name in self.steps if name not in parts}
        for name in self.steps:
            if name in parts:
                _put(self, name, parts[name])

    def forward(self, x: Tensor) -> Tensor:
        """What the last part gives."""
        for name in self.steps:
            x = (self.words.get(name) or self.get_submodule(name))(x)
        return x


def _expanded(network: nn.Module, step: str) -> list[str]:
    """The names of parts that a step stands for; a part goes before a word of the same name."""
    parts = dict(network.named_modules())
    if step and step in parts:
        return [step]
    some = _SLICE.fullmatch(step)
    if some and isinstance(parts.get(some[1]), nn.Sequential | nn.ModuleList):
        names = [name for name, _ in parts[some[1]].named_children()]
        chosen = names[slice(*(int(end) if end else None for end in some.groups()[1:]))]
        if not chosen:
            raise InputError(f"'{step}' has none of the {len(names)} parts of '{some[1]}'.")
        return [f"{some[1]}.{name}" for name in chosen]
    if step not in WORDS and not _PHOTOGRAPHS.fullmatch(step):
        told = ", ".join(name for name, _ in network.named_children())
        words = ", ".join([*WORDS, "photographs"])
        raise InputError(f"The network has no part '{step}'; it has {told}, and there are the words {words}.")
    return [step]


def _word(name: str) -> Callable[[Tensor], Tensor]:
    photographs = _PHOTOGRAPHS.fullmatch(name)
    if not photographs:
        return WORDS[name]
    return partial(_as_photographs, size=int(photographs[1] or 0))


def _as_photographs(images: Tensor, size: int) -> Tensor:
    return as_photographs(images, size, *IMAGENET)


def _put(root: nn.Module, name: str, part: nn.Module) -> None:
    """The part under its name, with empty modules for what it is inside of."""
    *path, last = name.split(".")
    for word in path:
        if word not in dict(root.named_children()):
            root.add_module(word, nn.Module())
        root = root.get_submodule(word)
    root.add_module(last, part)
