"""Local training: the one kernel that the clients and the centre share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mixfed.core import tree
from mixfed.core.batches import Batches, Batching
from mixfed.core.lookups import Guard, train_on_lookups
from mixfed.core.model import IDLE, Loss, Model
from mixfed.core.optim import Optimizer
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.errors import InputError


@dataclass(frozen=True)
class Trained:
    """Where local training ended: parameters and buffers, the mean loss, how many steps it took, and, if asked for
    and not recoverable from the parameters, Σₖ gₖ (before the correction)."""

    params: Params
    loss: Tensor
    steps: Tensor
    gradient_sum: Params | None = None


@dataclass(frozen=True)
class Move:
    """Part of a step: the weights of these names go down the gradient of this loss, while the others stand still."""

    loss: Loss
    names: tuple[str, ...]


class Kernel(Protocol):
    """Another way to do the same training, for batches that carry it."""

    def train(
        self,
        trainer: LocalTrainer,
        params: Params,
        batches: Batches,
        rate: float,
        correction: Params | None,
        loss: Loss,
        *,
        want_gradient: bool = False,
    ) -> Trained | None:
        """The same, or None where it cannot be done in this way."""


@dataclass(frozen=True)
class LocalTrainer:
    """x ← Optimizer(x, ∇loss(x; batch) + correction) over the batches of a round.

    ``clip`` bounds the norm of each step's gradient (before the correction, which is not the client's own).
    ``loss`` replaces the model's own loss, for a centre that minimises something else.
    Training in which parts of the model play against each other says so in ``moves``.
    """

    model: Model
    optimizer: Optimizer
    batching: Batching
    clip: float | None = None
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"Gradients can be clipped to a norm above 0, not to {self.clip}.")

    @property
    def own_loss(self) -> Loss:
        """The loss given or the model's; nothing of a batch that stands for examples which leave parameters alone."""
        given, model = self.loss, self.model
        if given is None:
            return model.loss

        def own(params: Params, batch: Batch) -> Tensor:
            return torch.zeros((), device=model.device, dtype=model.dtype) if IDLE in batch else given(params, batch)

        return own

    def moves(self, loss: Loss, round: int) -> list[Move]:
        """What is done with every batch, one after the other: here, all weights go down the loss together."""
        return [Move(loss, self.model.trainable)]

    @property
    def ageless(self) -> bool:
        """Whether training is the same in every round."""
        return self.optimizer.decay == 1

    def train(
        self,
        params: Params,
        batches: Batches,
        round: int = 0,
        *,
        correction: Params | None = None,
        loss: Loss | None = None,
        want_gradient: bool = False,
    ) -> Trained:
        """Runs the optimizer over the batches, starting from ``params`` (which is left untouched)."""
        moves = self.moves(loss or self.own_loss, round)
        if batches.tables and loss is None and self.clip is None and self.optimizer.is_plain_sgd and len(moves) == 1:
            return self._train_on_lookups(params, batches, round, correction)
        rate = self.optimizer.rate(round)
        if batches.kernel is not None and len(moves) == 1:
            found = batches.kernel.train(
                self, params, batches, rate, correction, moves[0].loss, want_gradient=want_gradient
            )
            if found is not None:
                return found
        start = tree.cast(params, self.model.dtype)
        weights = {name: start[name] for name in self.model.trainable}
        buffers = _own_buffers({n: start[n] for n in self.model.buffers}, batches)
        memories = {move.names: self.optimizer.init({n: weights[n] for n in move.names}) for move in moves}
        total_loss: Tensor | float = 0.0
        total_gradient: Params = {}
        owned = False
        want_gradient = want_gradient and not self.optimizer.is_plain_sgd
        for batch, active in batches:
            for move in moves:
                before = tree.clone(buffers) if active is not None else buffers
                moving, memory = {n: weights[n] for n in move.names}, memories[move.names]
                held = _holding(move.loss, {n: w for n, w in weights.items() if n not in moving}, batches)
                gradient, value, buffers = gradient_of(held, moving, buffers, batch, batches.vectorised)
                if self.clip is not None:
                    gradient = clipped(gradient, self.clip)
                if want_gradient:
                    masked = gradient if active is None else tree.scale(gradient, active.to(value.dtype))
                    total_gradient |= tree.add(masked, total_gradient)
                if correction is not None:
                    gradient = tree.add(gradient, correction)
                direction, remembered = self.optimizer.direction(gradient, memory, moving)
                if active is not None:
                    weights |= tree.where(active, tree.add(moving, direction, -rate), moving)
                    memories[move.names] = tree.where(active, remembered, memory)
                    buffers = tree.where(active, buffers, before)
                    value = value * active
                else:
                    weights |= _move(moving, direction, -rate, in_place=owned)
                    memories[move.names] = remembered
            owned = active is None
            total_loss = total_loss + value
        mean_loss = torch.as_tensor(total_loss / batches.steps)
        return Trained(weights | buffers, mean_loss, batches.steps, total_gradient or None)

    def _train_on_lookups(self, params: Params, batches: Batches, round: int, correction: Params | None) -> Trained:
        """The same with plain SGD where tables came by rows (see :mod:`mixfed.core.lookups`)."""
        start = tree.cast(params, self.model.dtype)
        parts = {
            "tables": {n: start[n] for n in batches.tables},
            "weights": {n: start[n] for n in self.model.trainable if n not in batches.tables},
            "buffers": {n: start[n] for n in self.model.buffers},
            "correction": correction or {},
        }
        end, total = train_on_lookups(self.own_loss, parts, batches, self.optimizer.rate(round))
        return Trained(end, total / batches.steps, batches.steps)


def gradient_of(
    loss: Loss, weights: Params, buffers: Params, batch: Batch, vectorised: bool = False
) -> tuple[Params, Tensor, Params]:
    """∇loss at the weights, the loss, and the buffers as the forward pass left them.

    Inside vmap only torch.func can differentiate; outside it the autograd tape does the same with less overhead.
    """
    if vectorised:

        def with_buffers(weights: Params, buffers: Params) -> tuple[Tensor, Params]:
            return loss(weights | buffers, batch), buffers

        gradient, (value, buffers) = torch.func.grad_and_value(with_buffers, has_aux=True)(weights, buffers)
        return gradient, value, buffers
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    with torch.enable_grad():
        value = loss(leaves | buffers, batch)
        if not value.requires_grad:
            return tree.zeros(weights), value, buffers
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    gradient = {
        n: torch.zeros_like(w) if g is None else g for (n, w), g in zip(weights.items(), gradients, strict=True)
    }
    return gradient, value.detach(), buffers


def clipped(gradient: Params, bound: float) -> Params:
    """g·min(1, bound/‖g‖)."""
    factor = (bound / (tree.norm(gradient) + 1e-12)).clamp(max=1.0)
    return tree.scale(gradient, factor)


def weighted(loss: Loss, weight: float) -> Loss:
    """weight·loss."""
    return lambda params, batch: weight * loss(params, batch)


@dataclass(frozen=True)
class Proximal:
    """loss(x) + μ/2·‖x − anchor‖² over the trainable leaves that the anchor names."""

    loss: Loss
    anchor: Params
    mu: float

    def __call__(self, params: Params, batch: Batch) -> Tensor:
        distance = torch.stack([(params[n] - a).square().sum() for n, a in self.anchor.items()]).sum()
        return self.loss(params, batch) + 0.5 * self.mu * distance


def _holding(loss: Loss, fixed: Params, batches: Batches) -> Loss:
    """The loss as a function of the other parameters alone."""
    if batches.rows:

        def guarded(params: Params, batch: Batch) -> Tensor:
            with Guard(fixed | params, batches):
                return loss(fixed | params, batch)

        return guarded
    return (lambda params, batch: loss(fixed | params, batch)) if fixed else loss


def _own_buffers(buffers: Params, batches: Batches) -> Params:
    """Copies that BatchNorm may write into; under vmap one for each client (adding a per-client zero makes it so)."""
    if not batches.vectorised:
        return tree.clone(buffers)
    zero = batches.key * 0
    return {name: b + zero.to(b.dtype) for name, b in buffers.items()}


def _move(weights: Params, direction: Params, scale: float, *, in_place: bool) -> Params:
    if not in_place:
        return tree.add(weights, direction, scale)
    for name, d in direction.items():
        weights[name].add_(d, alpha=scale)
    return weights
