"""Fair local representations: an adversary tries to read protected attributes from them (Liang et al., 2020, App. B).

The local ℓ, the client's copy of g and the adversary a solve min_{ℓ,g} max_a L_g(ℓ, g) − λ·L_a(ℓ, a), where L_a is the
adversary's own loss: alternately, a step of a against the representation as it is, then a step of ℓ and g against a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mixfed.core.model import IDLE, Loss, masked_mean
from mixfed.core.train import LocalTrainer, Move
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.errors import InputError
from mixfed.models.parts import AUXILIARY, ENCODER


@dataclass(frozen=True)
class Minimax(LocalTrainer):
    """Local training of a network in parts (:class:`mixfed.models.parts.Parts`) against its adversary.

    For each batch: a ← a − η∇L_a, ``adversary_steps`` times, then (ℓ, g) ← (ℓ, g) − η∇(L_g − λL_a). ``strength`` is λ;
    in the first ``pretrain`` rounds it is 0, so that the representation and the adversary know something before they
    compete. With ``in_turn`` the three take their steps one after the other as in the paper: ℓ, then g, then a.
    """

    strength: float = 1.0
    pretrain: int = 0
    adversary_steps: int = 1
    in_turn: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.strength >= 0 or self.pretrain < 0:
            raise InputError("The strength of an adversary and its rounds of pre-training cannot be negative.")
        if self.adversary_steps < 1:
            raise InputError(f"An adversary takes 1 or more steps at a time, not {self.adversary_steps}.")
        if not any(name.startswith(AUXILIARY) for name in self.model.trainable):
            raise InputError("Minimax training needs a network with an auxiliary model that is the adversary.")

    @property
    def same_in_every_round(self) -> bool:
        """Not if some rounds are for pre-training."""
        return super().same_in_every_round and not self.pretrain

    def moves(self, loss: Loss, round: int) -> list[Move]:
        """The adversary against the representation as it is and the others against the adversary, or in turn."""
        strength = self.strength if round >= self.pretrain else 0.0
        against = tuple(name for name in self.model.trainable if name.startswith(AUXILIARY))
        others = tuple(name for name in self.model.trainable if name not in against)

        def dual(params: Params, batch: Batch) -> Tensor:
            value = loss(params, batch)
            return value - strength * self.adversary_loss(params, batch) if self.strength else value

        adversary = [Move(self.adversary_loss, against)] * self.adversary_steps
        if not self.in_turn:
            return [*adversary, Move(dual, others)]
        encoder = tuple(name for name in others if name.startswith(ENCODER))
        head = tuple(name for name in others if name not in encoder)
        return [*(Move(dual, names) for names in (encoder, head) if names), *adversary]

    def adversary_loss(self, params: Params, batch: Batch) -> Tensor:
        """L_a: the adversary's mean loss over the real examples of the batch."""
        if IDLE in batch:
            return torch.zeros((), device=self.model.device, dtype=self.model.dtype)
        _, losses = self.model.outputs(params, batch, training=True)
        return masked_mean(losses, batch.get("mask"))
