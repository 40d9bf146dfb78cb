"""Local training: the one kernel that the clients and the centre share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mixfed.core import tree
from mixfed.core.batches import Batches, Batching
from mixfed.core.model import IDLE, Loss, Model
from mixfed.core.optim import Optimizer, given
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.errors import InputError
from mixfed.models import vmap
from mixfed.ranges import Positive, check_range

REPEATED = 1 << 16
"""Numbers of a weight up to which it is repeated for all clients of a chunk that have it in common. With a larger one,
or in a convolution, their examples are better one large batch."""

TURNED = 1 << 20
"""Numbers of a matrix, over all clients of a chunk, from which on torch.func is the faster one: the tape leaves the
gradient of a linear layer turned, and to add that to the weight takes more than torch.func's bookkeeping."""


@dataclass(frozen=True)
class Trained:
    """Where local training ended: parameters and buffers, the mean loss, how many steps it took, and, if asked for
    and not recoverable from the parameters, Σₖ gₖ (before the correction)."""

    params: Params
    loss: Tensor
    steps: Tensor
    gradient_sum: Params | None = None


class Kernel(Protocol):
    """Another way to take the steps of a round, for batches of which somebody knows a better one.

    Batches carry it (:class:`mixfed.core.batches.Batches`), so that local training need not know about rows of tables
    or about factors of weights.
    """

    def train(
        self,
        trainer: LocalTrainer,
        params: Params,
        batches: Batches,
        round: int,
        correction: Params | None,
        loss: Loss | None,
        *,
        want_gradient: bool = False,
    ) -> Trained | None:
        """What :meth:`LocalTrainer.train` gives, or None where this way does not suit the trainer."""

    def guarded(self, loss: Loss, batches: Batches) -> Loss:
        """The loss, refusing what it must not do with the parameters of these batches."""


@dataclass(frozen=True)
class Move:
    """Part of a step: the weights of these names go down the gradient of this loss, while the others stand still."""

    loss: Loss
    names: tuple[str, ...]


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
        if not isinstance(self.model, Model):
            raise InputError(
                f"A trainer takes a mixfed.Model, such as mixfed.Model(network, mixfed.cross_entropy), and not a"
                f" {type(self.model).__name__}."
            )
        given(self.optimizer, "The optimizer of a trainer")
        if not isinstance(self.batching, Batching):
            raise InputError(
                f"A trainer takes a mixfed.Batching, such as mixfed.Batching(10, epochs=1), not {self.batching!r}."
            )
        check_range(self.clip, Positive | None, "'clip' of a trainer")

    @property
    def own_loss(self) -> Loss:
        """The loss that was given, else the model's.

        A batch with the field ``IDLE`` has no examples, and its loss is zero.
        """
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
    def same_in_every_round(self) -> bool:
        """Whether training does not depend on the number of the round."""
        return self.optimizer.is_constant

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
        if batches.kernel is not None and batches.memory is None:
            trained = batches.kernel.train(self, params, batches, round, correction, loss, want_gradient=want_gradient)
            if trained is not None:
                return trained
        moves = self.moves(loss or self.own_loss, round)
        start = tree.cast(params, self.model.dtype)
        weights = {name: start[name] for name in self.model.trainable}
        buffers = _own_buffers({n: start[n] for n in self.model.buffers}, batches)
        memories = {move.names: self.optimizer.init({n: weights[n] for n in move.names}) for move in moves}
        if batches.memory is not None:
            kept = batches.memory.kept
            memories |= {move.names: kept[str(i)] for i, move in enumerate(moves) if str(i) in kept}
        rate = self.optimizer.rate(round)
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
                if active is None:
                    moved, memories[move.names] = self.optimizer.moved(
                        moving, gradient, memory, rate, owned=owned, vectorised=batches.vectorised
                    )
                    weights |= moved
                    continue
                direction, remembered = self.optimizer.direction(gradient, memory, moving)
                weights |= tree.where(active, tree.add(moving, direction, -rate), moving)
                memories[move.names] = tree.where(active, remembered, memory)
                buffers = tree.where(active, buffers, before)
                value = value * active
            owned = True
            total_loss = total_loss + value
        if batches.memory is not None:
            batches.memory.kept = {str(i): memories[move.names] for i, move in enumerate(moves) if memories[move.names]}
        mean_loss = torch.as_tensor(total_loss / batches.steps)
        return Trained(weights | buffers, mean_loss, batches.steps, total_gradient or None)


def gradient_of(
    loss: Loss, weights: Params, buffers: Params, batch: Batch, vectorised: bool = False
) -> tuple[Params, Tensor, Params]:
    """∇loss at the weights, the loss, and the buffers as the forward pass left them.

    The autograd tape does what torch.func does with less overhead: outside vmap, and beneath it, where weights are each
    client's own, or small enough to be repeated, and not too large together.
    """
    clients = vmap.clients_alone(batch) if vectorised and not buffers else 0
    if clients and all(_suits_tape(w, clients) for w in weights.values()):
        found = _gradient_beneath(loss, weights, batch, clients)
        if found is not None:
            return *found, buffers
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


def _suits_tape(weight: Tensor, clients: int) -> bool:
    is_own = vmap.made_of(weight)[1] or (weight.numel() <= REPEATED and weight.ndim < 4)
    return is_own and (weight.ndim != 2 or weight.numel() * clients <= TURNED)


def _gradient_beneath(loss: Loss, weights: Params, batch: Batch, clients: int) -> tuple[Params, Tensor] | None:
    """The same of so many clients under vmap, from plain weights [clients, …] beneath it.

    None where a weight has no part in the loss: the tape may have missed an operator that has a rule for vmap in
    Python, so that torch.func has to tell.
    """
    plain = {name: vmap.of_each(w, clients) for name, w in weights.items()}
    with vmap.outside():
        leaves = {name: w.detach().requires_grad_() for name, w in plain.items()}
    with torch.enable_grad():
        value = loss({name: vmap.each(leaf) for name, leaf in leaves.items()}, batch)
    values, _ = vmap.made_of(value)
    with vmap.outside():
        found = derivatives_of_each(values, list(leaves.values()))
        values = values.detach()
    gradient = {name: vmap.each(g) for name, g in zip(leaves, found, strict=True) if g is not None}
    return (gradient, vmap.each(values)) if len(gradient) == len(leaves) else None


def derivatives_of_each(values: Tensor, by: list[Any]) -> tuple[Tensor | None, ...]:
    """Those of each client's value: clients have nothing in common, so that the derivatives of a sum are each one's."""
    if not values.requires_grad:
        return (None,) * len(by)
    return torch.autograd.grad(values, by, torch.ones_like(values), allow_unused=True)


def clipped(gradient: Params, bound: float) -> Params:
    """g·min(1, bound/‖g‖)."""
    factor = (bound / (tree.norm(gradient) + 1e-12)).clamp(max=1.0)
    return tree.scale(gradient, factor)


def weighted(loss: Loss, weight: float) -> Loss:
    """weight·loss."""
    return lambda params, batch: weight * loss(params, batch)


@dataclass(frozen=True)
class Proximal:
    """loss(x) + μ/2·‖x − anchor‖² over the trainable leaves that the anchor names.

    A value and not a closure, so that whoever knows the gradient of the second term need not compute it.
    """

    loss: Loss
    anchor: Params
    mu: float

    def __call__(self, params: Params, batch: Batch) -> Tensor:
        distance = torch.stack([(params[n] - a).square().sum() for n, a in self.anchor.items()]).sum()
        return self.loss(params, batch) + 0.5 * self.mu * distance


def _holding(loss: Loss, fixed: Params, batches: Batches) -> Loss:
    """The loss as a function of the other parameters alone."""
    guarded = batches.kernel.guarded(loss, batches) if batches.kernel is not None else loss
    return (lambda params, batch: guarded(fixed | params, batch)) if fixed else guarded


def _own_buffers(buffers: Params, batches: Batches) -> Params:
    """Copies that BatchNorm may write into; under vmap one for each client (adding a per-client zero makes it so)."""
    if not batches.vectorised:
        return tree.clone(buffers)
    zero = batches.key * 0
    return {name: b + zero.to(b.dtype) for name, b in buffers.items()}
