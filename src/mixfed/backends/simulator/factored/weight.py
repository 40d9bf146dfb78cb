"""A weight of all clients of a chunk while they train: the start they share, and the pairs of vectors of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.backends.simulator.factored.factors import Factors, Pairs
from mixfed.core.optim import Optimizer
from mixfed.models.products import linear

Paths = tuple[NDArray[np.float64], NDArray[np.float64]]

LINEAR_RULES = ("sgd", "sgd+decay", "momentum", "nesterov")
"""Optimizers whose weights are sums of the start and of gradients, with coefficients that no data changes."""


def pays(shape: tuple[int, ...], rank: int) -> bool:
    """Whether so many pairs of vectors are less than the matrix: rank·(in + out) < in·out."""
    return len(shape) == 2 and rank * (shape[0] + shape[1]) < shape[0] * shape[1]


@lru_cache(maxsize=64)
def coefficients(optimizer: Optimizer, rate: float, steps: int, corrected: bool, mu: float) -> Paths:
    """A weight after 0, 1, … steps, and the sum of its gradients so far, as coordinates [steps + 1, 2 + steps].

    The coordinates are those of the start, of the correction and of each step's gradient of the loss. The optimizer is
    linear, so that it does to the coordinates of a weight what it does to the weight.
    """
    axes = torch.eye(2 + steps, dtype=torch.float64)
    at, seen = axes[0], torch.zeros(2 + steps, dtype=torch.float64)
    memory = optimizer.init({"": at})
    path, gradients = [at], [seen]
    for axis in axes[2:]:
        gradient = axis + mu * (at - axes[0])
        seen = seen + gradient
        direction, memory = optimizer.direction({"": gradient + axes[1] if corrected else gradient}, memory, {"": at})
        at = at - rate * direction[""]
        path.append(at)
        gradients.append(seen)
    return torch.stack(path).numpy(), torch.stack(gradients).numpy()


@dataclass
class Weight:
    """A weight in factors. ``path`` and ``seen`` are what :func:`coefficients` gives."""

    start: Tensor
    correction: Tensor | None
    path: NDArray[np.float64]
    seen: NDArray[np.float64]
    blocks: list[tuple[Pairs, list[int]]] = field(default_factory=list)
    shared: Tensor = field(init=False)
    own: list[tuple[Pairs, Tensor | float]] = field(init=False)

    def at_step(self, k: int) -> None:
        """Makes ready for step k. Blocks of pairs are put together as the digits of a binary counter are carried, so
        that there are few of them and each is seldom copied."""
        while len(self.blocks) > 1 and len(set(self.blocks[-2][1])) == len(set(self.blocks[-1][1])):
            (first, early), (second, late) = self.blocks[-2:]
            self.blocks[-2:] = [(Pairs.joined([first, second]), early + late)]
        of_start, of_correction, *of_steps = self.path[k].tolist()
        self.shared = self.start if of_start == 1 else self.start * of_start
        if self.correction is not None and of_correction:
            self.shared = torch.add(self.shared, self.correction, alpha=of_correction)
        self.own = []
        for pairs, steps in self.blocks:
            own = [of_steps[step] for step in steps]
            alike = all(c == own[0] for c in own)
            self.own.append((pairs, own[0] if alike else pairs.inputs.new_tensor(own)))

    @property
    def stays(self) -> bool:
        """Whether the shared part is the start itself at every step."""
        return self.correction is None and bool((self.path[:, 0] == 1).all())

    def applied(self, x: Tensor, ready: Tensor | None = None) -> Tensor:
        """x·Wᵢᵀ for x [clients, n, in]; ``ready`` is x·Wᵀ with the shared part, where that is known."""
        z = linear(x, self.shared) if ready is None else ready
        for (inputs, gradients), scale in self.own:
            z = _added(z, x, inputs, gradients, scale)
        return z

    def back(self, d: Tensor) -> Tensor:
        """d·Wᵢ for d [clients, n, out]."""
        x = linear(d, self.shared.mT)
        for (inputs, gradients), scale in self.own:
            x = _added(x, d, gradients, inputs, scale)
        return x

    def add(self, pairs: list[Pairs], k: int) -> None:
        """Takes the pairs of step k."""
        if pairs:
            one = Pairs.joined(pairs)
            self.blocks.append((one, [k] * one.inputs.shape[1]))

    def factors(self, path: NDArray[np.float64], taken: NDArray[np.int64]) -> Factors:
        """Where the path leads each client, after as many steps as it has taken."""
        own = path[taken]
        shared = (self.start,) if self.correction is None else (self.start, self.correction)
        steps = [2 + k for _, steps in self.blocks for k in steps]
        return Factors(shared, own[:, : len(shared)], tuple(pairs for pairs, _ in self.blocks), own[:, steps])


def _added(onto: Tensor, x: Tensor, near: Tensor, far: Tensor, scale: Tensor | float) -> Tensor:
    """onto + scale·(x·nearᵀ)·far of every client; a scale of each client's own is a tensor."""
    close = torch.bmm(x, near.mT)
    if isinstance(scale, Tensor):
        return torch.baddbmm(onto, close * scale, far)
    return torch.baddbmm(onto, close, far, alpha=scale)
