"""Optimizers as values: a learning rate and a rule that turns gradients into a direction.

The same values serve as client, server, central and merge optimizers. A server optimizer receives −Δ as its gradient
(Reddi et al., Adaptive Federated Optimization), so FedAvgM, FedAdam, FedYogi and FedAdagrad are FedAvg with
``momentum``, ``adam``, ``yogi`` and ``adagrad`` here. Every rule is written leaf by leaf in plain tensor operations so
that it also runs under ``torch.vmap``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mixfed.core import tree
from mixfed.core.tree import Params
from mixfed.errors import InputError
from mixfed.ranges import NotNegative, PartOfOne, Positive, Rule, SomeShare, within_ranges

Memory = dict[str, Any]


@within_ranges()
@dataclass(frozen=True)
class Optimizer:
    """x ← x − ηₜ·direction(gradient, memory), ηₜ = η·decayᵗ/(1 + inverse_decay·t) in round t.

    ``init`` makes the memory (a tree, so that it can be checkpointed) and ``direction`` returns the step's direction
    and the next memory. ``write`` does both to given parameters and memory in one pass, where PyTorch has that: the
    many passes of a rule over a small model's memory take longer than its gradient.
    """

    rule: str
    learning_rate: NotNegative
    init: Callable[[Params], Memory]
    direction: Callable[[Params, Memory, Params], tuple[Params, Memory]]
    decay: SomeShare = 1.0
    inverse_decay: NotNegative = 0.0
    write: Callable[[Params, Params, Memory, float], None] | None = None

    def rate(self, round: int) -> float:
        """ηₜ."""
        return float(self.learning_rate * self.decay**round / (1 + self.inverse_decay * round))

    @property
    def is_constant(self) -> bool:
        """Whether the rate is the same in every round."""
        return self.decay == 1 and self.inverse_decay == 0

    def step(self, params: Params, gradient: Params, memory: Memory, round: int = 0) -> tuple[Params, Memory]:
        """One update of the leaves that the gradient names; other leaves pass through."""
        moved = {name: params[name] for name in gradient}
        direction, memory = self.direction(gradient, memory, moved)
        return tree.add(params, direction, -self.rate(round)), memory

    def moved(
        self, params: Params, gradient: Params, memory: Memory, rate: float, *, owned: bool, vectorised: bool
    ) -> tuple[Params, Memory]:
        """One update of these leaves with this rate. Those that are ``owned``, with their memory, may be written into;
        ``vectorised`` ones stand for many under vmap."""
        if self.write is not None and not vectorised and all(_is_plain(p) for p in params.values()):
            if not owned:
                params = tree.clone(params)
                memory = {part: _copied(kept, params) for part, kept in memory.items()}
            self.write(params, gradient, memory, rate)
            return params, memory
        direction, memory = self.direction(gradient, memory, params)
        if not owned:
            return tree.add(params, direction, -rate), memory
        for name, d in direction.items():
            params[name].add_(d, alpha=-rate)
        return params, memory

    @property
    def is_plain_sgd(self) -> bool:
        """Whether Δ = −η·Σ gradients, so that a gradient can be recovered from an update."""
        return self.rule == "sgd"


@within_ranges(Rule("Nesterov's rule needs momentum above 0.", lambda nesterov, momentum: not nesterov or momentum > 0))
def sgd(
    learning_rate: NotNegative,
    *,
    momentum: PartOfOne = 0.0,
    nesterov: bool = False,
    weight_decay: NotNegative = 0.0,
    decay: SomeShare = 1.0,
    inverse_decay: NotNegative = 0.0,
) -> Optimizer:
    """Gradient descent: m ← βm + g, direction m (Nesterov: g + βm; β = 0: g), with g ← g + λx before."""

    def init(params: Params) -> Memory:
        return {"momentum": tree.zeros(params)} if momentum else {}

    def direction(gradient: Params, memory: Memory, params: Params) -> tuple[Params, Memory]:
        gradient = _decayed(gradient, params, weight_decay)
        if not momentum:
            return gradient, memory
        moving = {n: memory["momentum"][n] * momentum + g for n, g in gradient.items()}
        ahead = tree.add(gradient, moving, momentum) if nesterov else moving
        return ahead, {"momentum": moving}

    def write(params: Params, gradient: Params, memory: Memory, rate: float) -> None:
        names = list(params)
        torch._fused_sgd_(
            [params[n] for n in names],
            [_laid_out_as(gradient[n], params[n]) for n in names],
            [memory["momentum"][n] for n in names],
            weight_decay=weight_decay,
            momentum=momentum,
            lr=rate,
            dampening=0.0,
            nesterov=nesterov,
            maximize=False,
            is_first_step=False,  # a memory of zeros takes the first gradient as it is
        )

    rule = (
        "sgd" if not (momentum or weight_decay) else "nesterov" if nesterov else "momentum" if momentum else "sgd+decay"
    )
    return Optimizer(rule, learning_rate, init, direction, decay, inverse_decay, write if momentum else None)


@within_ranges()
def adam(
    learning_rate: NotNegative,
    *,
    betas: tuple[PartOfOne, PartOfOne] = (0.9, 0.999),
    epsilon: Positive = 1e-8,
    weight_decay: NotNegative = 0.0,
    bias_correction: bool = True,
    initial: NotNegative = 0.0,
    decay: SomeShare = 1.0,
) -> Optimizer:
    """Adam: m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², direction m̂/(√v̂ + ε).

    FedAdam as published has no bias correction, ε = τ = 1e-3, and v starts at τ² (``bias_correction=False,
    epsilon=1e-3, initial=1e-6``).
    """

    def second(v: Tensor, g: Tensor) -> Tensor:
        return v * betas[1] + g * g * (1 - betas[1])

    def write(params: Params, gradient: Params, memory: Memory, rate: float) -> None:
        memory["count"] += 1
        names = list(params)
        torch._fused_adam_(
            [params[n] for n in names],
            [_laid_out_as(gradient[n], params[n]) for n in names],
            [memory["first"][n] for n in names],
            [memory["second"][n] for n in names],
            [],
            [memory["count"]] * len(names),
            lr=rate,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=epsilon,
            amsgrad=False,
            maximize=False,
        )

    made = _adaptive("adam", learning_rate, betas, epsilon, weight_decay, bias_correction, initial, decay, second)
    return replace(made, write=write) if bias_correction else made


@within_ranges()
def yogi(
    learning_rate: NotNegative,
    *,
    betas: tuple[PartOfOne, PartOfOne] = (0.9, 0.99),
    epsilon: Positive = 1e-3,
    weight_decay: NotNegative = 0.0,
    bias_correction: bool = False,
    initial: NotNegative = 0.0,
    decay: SomeShare = 1.0,
) -> Optimizer:
    """Yogi: as Adam with v ← v − (1−β₂)·g²·sign(v − g²), which lets v fall only slowly."""

    def second(v: Tensor, g: Tensor) -> Tensor:
        squared = g * g
        return v - squared * torch.sign(v - squared) * (1 - betas[1])

    return _adaptive("yogi", learning_rate, betas, epsilon, weight_decay, bias_correction, initial, decay, second)


@within_ranges()
def adagrad(
    learning_rate: NotNegative,
    *,
    epsilon: Positive = 1e-3,
    initial: NotNegative = 0.0,
    weight_decay: NotNegative = 0.0,
    decay: SomeShare = 1.0,
) -> Optimizer:
    """AdaGrad: v ← v + g², direction g/(√v + ε)."""

    def init(params: Params) -> Memory:
        return {"second": {n: torch.full_like(p, initial) for n, p in params.items()}}

    def direction(gradient: Params, memory: Memory, params: Params) -> tuple[Params, Memory]:
        gradient = _decayed(gradient, params, weight_decay)
        second = {n: memory["second"][n] + g * g for n, g in gradient.items()}
        return {n: g / (second[n].sqrt() + epsilon) for n, g in gradient.items()}, {"second": second}

    return Optimizer("adagrad", learning_rate, init, direction, decay)


def given(optimizer: Optimizer | None, what: str) -> Optimizer:
    """The optimizer that a user gave, or SGD with rate 1, which takes a change as it is."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise InputError(
            f"{what} is one of mixfed, such as mixfed.sgd(0.1) or mixfed.adam(1e-3), and not a {kind}, because its"
            " memory has to travel and to be saved."
        )
    return sgd(1.0) if optimizer is None else optimizer


def with_rate(optimizer: Optimizer, learning_rate: float) -> Optimizer:
    """The same rule with another learning rate."""
    return replace(optimizer, learning_rate=learning_rate)


def _adaptive(
    rule: str,
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    initial: float,
    decay: float,
    second_moment: Callable[[Tensor, Tensor], Tensor],
) -> Optimizer:

    def init(params: Params) -> Memory:
        some = next(iter(params.values()))
        count = torch.zeros((), device=some.device, dtype=torch.promote_types(some.dtype, torch.float32))
        second = {n: torch.full_like(p, initial) for n, p in params.items()}
        return {"first": tree.zeros(params), "second": second, "count": count}

    def direction(gradient: Params, memory: Memory, params: Params) -> tuple[Params, Memory]:
        gradient = _decayed(gradient, params, weight_decay)
        count = memory["count"] + 1
        first = {n: memory["first"][n] * betas[0] + g * (1 - betas[0]) for n, g in gradient.items()}
        second = {n: second_moment(memory["second"][n], g) for n, g in gradient.items()}
        memory = {"first": first, "second": second, "count": count}
        if not bias_correction:
            return {n: m / (second[n].sqrt() + epsilon) for n, m in first.items()}, memory
        c1, c2 = _warmth(betas[0], count), _warmth(betas[1], count)
        return {n: (m / c1) / ((second[n] / c2).sqrt() + epsilon) for n, m in first.items()}, memory

    return Optimizer(rule, learning_rate, init, direction, decay)


def _is_plain(x: Tensor) -> bool:
    """Whether PyTorch's one-pass rules do with x what the formulas here do."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def _copied(kept: Any, params: Params) -> Any:
    """A copy of a part of the memory; what belongs to a parameter has the parameter's layout."""
    if isinstance(kept, Tensor):
        return kept.clone()
    return {n: torch.empty_like(params[n]).copy_(x) for n, x in kept.items()}


def _laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory layout of the other; one-pass rules go through memory in its own order."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def _warmth(beta: float, count: Tensor) -> Tensor:
    """1 − βᵗ, without the cancellation that costs five digits at β = 0.999."""
    return -torch.expm1(count * math.log(beta)) if beta else torch.ones_like(count)


def _decayed(gradient: Params, params: Params, weight_decay: float) -> Params:
    return tree.add(gradient, params, weight_decay) if weight_decay else gradient
