"""Fair local representations: an adversary tries to read protected attributes from them (Liang et al., 2020, App. B).

The local ℓ, the client's copy of g and the adversary a solve min_{ℓ,g} max_a L_g(ℓ, g) − λ·L_a(ℓ, a), where L_a is the
adversary's own loss: alternately, a step of a against the representation as it is, then a step of ℓ and g against a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mixfed import tree
from mixfed.batches import Batches
from mixfed.errors import InputError
from mixfed.local import LocalTrainer, Trained, clipped, gradient_of
from mixfed.model import Batch, Loss, masked_mean
from mixfed.optim import Memory
from mixfed.tree import Params

ADVERSARY = "auxiliary."


@dataclass(frozen=True)
class Minimax(LocalTrainer):
    """Local training of a network in parts (:class:`mixfed.models.parts.Parts`) against its adversary.

    For each batch: a ← a − η∇L_a, then (ℓ, g) ← (ℓ, g) − η∇(L_g − λL_a). ``strength`` is λ; in the first ``pretrain``
    rounds it is 0, so that the representation and the adversary know something before they compete.
    """

    strength: float = 1.0
    pretrain: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.strength >= 0 or self.pretrain < 0:
            raise InputError("The strength of an adversary and its rounds of pre-training cannot be negative.")
        if not any(name.startswith(ADVERSARY) for name in self.model.trainable):
            raise InputError("Minimax training needs a network with an adversary; set auxiliary.kind to 'adversary'.")

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
        """Alternates over the batches, starting from ``params``."""
        if want_gradient:
            raise InputError("Gradient transfer has no one gradient to share where clients play against adversaries.")
        prediction = loss or self.loss or self.model.loss
        strength = self.strength if round >= self.pretrain else 0.0
        start = tree.cast(params, self.model.dtype)
        buffers = tree.clone({n: start[n] for n in self.model.buffers})
        against = {n: start[n] for n in self.model.trainable if n.startswith(ADVERSARY)}
        others = {n: start[n] for n in self.model.trainable if n not in against}
        memories = [self.optimizer.init(against), self.optimizer.init(others)]
        total: Tensor | float = 0.0

        def dual(whole: Params, batch: Batch) -> Tensor:
            value = prediction(whole, batch)
            return value - strength * self.adversary_loss(whole, batch) if strength else value

        for batch, active in batches:
            vectorised = batches.vectorised
            against, _, memories[0] = self._step(
                self.adversary_loss, against, others | buffers, batch, vectorised, active, memories[0], round
            )
            others, value, memories[1] = self._step(
                dual, others, against | buffers, batch, vectorised, active, memories[1], round, correction
            )
            total = total + (value if active is None else value * active)
        return Trained(others | against | buffers, torch.as_tensor(total / batches.steps), batches.steps)

    def adversary_loss(self, params: Params, batch: Batch) -> Tensor:
        """L_a: the adversary's mean loss over the real examples of the batch."""
        _, losses = self.model.outputs(params, batch, training=True)
        return masked_mean(losses, batch.get("mask"))

    def _step(
        self,
        loss: Loss,
        moving: Params,
        fixed: Params,
        batch: Batch,
        vectorised: bool,
        active: Tensor | None,
        memory: Memory,
        round: int,
        correction: Params | None = None,
    ) -> tuple[Params, Tensor, Memory]:
        gradient, value, _ = gradient_of(lambda whole, batch: loss(fixed | whole, batch), moving, {}, batch, vectorised)
        if self.clip is not None:
            gradient = clipped(gradient, self.clip)
        if correction is not None:
            gradient = tree.add(gradient, correction)
        direction, remembered = self.optimizer.direction(gradient, memory, moving)
        moved = tree.add(moving, direction, -self.optimizer.rate(round))
        if active is not None:
            moved, remembered = tree.where(active, moved, moving), tree.where(active, remembered, memory)
        return moved, value, remembered
