"""Training of a chunk whose clients' wide weights are in factors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.backends.simulator.factored.chain import Chain
from mixfed.backends.simulator.factored.factors import Pairs
from mixfed.backends.simulator.factored.matrix import Factored
from mixfed.backends.simulator.factored.watch import Watch
from mixfed.backends.simulator.factored.weight import LINEAR_RULES, Weight, coefficients, pays
from mixfed.core import tree
from mixfed.core.batches import Batches
from mixfed.core.model import Loss, Model
from mixfed.core.train import LocalTrainer, Proximal, Trained, derivatives_of_each
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.models import vmap
from mixfed.models.products import linear

_UNSUITED: WeakKeyDictionary[Model, dict[Hashable, set[str]]] = WeakKeyDictionary()
"""Weights of a model that cannot be in factors, by candidates, kind of loss and shapes of batches. Their uses show it,
and so that it is found out once and not in every round, it is kept."""


@dataclass(frozen=True)
class InFactors:
    """How clients of a chunk train if their wide weights stay in factors; see :class:`mixfed.core.train.Kernel`."""

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
        """What :meth:`LocalTrainer.train` gives, with :class:`Factored` weights. None: no weight can be factored.

        A client's steps are the first ones of the batches.
        """
        moves = trainer.moves(loss or trainer.own_loss, round)
        clients, each = vmap.made_of(batches.key)
        if not (batches.vectorised and each and batches.fields) or len(moves) > 1:
            return None
        given, start = moves[0].loss, tree.cast(params, trainer.model.dtype)
        names = _candidates(trainer, start, batches, correction or {}, given)
        known = _UNSUITED.setdefault(trainer.model, {})
        case = (frozenset(names), type(given), *((n, x.shape) for n, x in batches.fields.items()))
        names -= known.get(case, set())
        rate = trainer.optimizer.rate(round)
        while names:
            chunk = _Chunk(trainer, start, batches, rate, correction or {}, given, names, len(clients), want_gradient)
            found = chunk.train()
            if found is not None:
                return found
            known[case] = known.get(case, set()) | chunk.unsuited
            names -= chunk.unsuited
        return None

    def guarded(self, loss: Loss, batches: Batches) -> Loss:
        """The loss itself: no parameter is a part of a larger one."""
        return loss


def _candidates(trainer: LocalTrainer, start: Params, batches: Batches, correction: Params, loss: Loss) -> set[str]:
    """The weights that may be in factors, for all that is known before they are used.

    All clients must start from the same weight, and be corrected and pulled in the same way.
    """
    if trainer.optimizer.rule not in LINEAR_RULES:
        return set()
    anchor = loss.anchor if isinstance(loss, Proximal) else {}
    if trainer.clip is not None and anchor:
        return set()  # a norm over factors and pull together is not worth its code
    rank = batches.length * next(iter(batches.fields.values())).shape[1]
    found = set()
    for n in trainer.model.trainable:
        alike = not any(vmap.made_of(x[n])[1] for x in (start, correction) if n in x)
        precise = start[n].dtype in (torch.float32, torch.float64)
        if alike and precise and pays(tuple(start[n].shape), rank) and anchor.get(n, start[n]) is start[n]:
            found.add(n)
    return found


@dataclass
class _Chunk:
    """Training of one chunk with the weights of these ``names`` in factors.

    All tensors of the chunk, but for what the loss is given, are plain ones with a first dimension over clients.
    """

    trainer: LocalTrainer
    start: Params
    batches: Batches
    rate: float
    correction: Params
    loss: Loss
    names: set[str]
    clients: int
    want_gradient: bool
    unsuited: set[str] = field(default_factory=set)

    def train(self) -> Trained | None:
        """None if some of the weights turned out to be ``unsuited``."""
        model, batches = self.trainer.model, self.batches
        self.active = None if batches.active is None else self._plain(batches.active)
        self.dense = {n: self._plain(self.start[n]) for n in model.trainable if n not in self.names}
        self.dense_correction = {n: vmap.made_of(c)[0] for n, c in self.correction.items() if n in self.dense}
        self.buffers = {n: vmap.each(self._plain(self.start[n]).clone()) for n in model.buffers}
        with vmap.outside():
            self.weights = self._weights()
            self.memory = self.trainer.optimizer.init(self.dense)
            self.total = torch.zeros(self.clients, dtype=model.dtype, device=model.device)
            self.want_gradient = self.want_gradient and not self.trainer.optimizer.is_plain_sgd
            self.total_gradient = tree.zeros(self.dense) if self.want_gradient else {}
            self.chain = self._chain()
            self.ready = self._first_products(self.chain) if self.chain is not None else None
        for k, (batch, _) in enumerate(batches):
            before = tree.clone(self.buffers) if self.active is not None else self.buffers
            found = self._gradient(batch, k) if self.chain is None else self._along(self.chain, batch, k)
            if found is None:
                return None
            with vmap.outside():
                self._step(k, *found)
            if self.active is not None:
                self.buffers = tree.where(vmap.each(self.active[:, k]), self.buffers, before)
        return self._trained()

    def _weights(self) -> dict[str, Weight]:
        found = {}
        for n in sorted(self.names):
            mu = self.loss.mu if isinstance(self.loss, Proximal) and n in self.loss.anchor else 0.0
            correction = self.correction.get(n)
            paths = coefficients(self.trainer.optimizer, self.rate, self.batches.length, correction is not None, mu)
            found[n] = Weight(self.start[n], correction, *paths)
        return found

    def _chain(self) -> Chain | None:
        """The network as a chain of layers, where that and its own loss is all that clients train."""
        model, x = self.trainer.model, self.batches.fields.get("x")
        chain = Chain.of(model) if self.loss == model.loss and x is not None else None
        return chain if chain is not None and chain.suits(self._inputs(self.batches.fields), self.start) else None

    def _inputs(self, fields: Batch) -> Tensor:
        """What the network takes, in the precision in which the model gives it."""
        x, dtype = self._plain(fields["x"]), self.trainer.model.dtype
        return x.to(dtype) if dtype != torch.float32 and x.is_floating_point() else x

    def _first_products(self, chain: Chain) -> Tensor | None:
        """x·Wᵀ of the first layer for all steps at once [steps, clients, batch, out]; None where W is not the same at
        every step, or not in factors."""
        first, x = self.weights.get(chain.first), self._inputs(self.batches.fields).movedim(1, 0)
        return linear(x.flatten(3), first.start) if first is not None and first.stays and x.is_contiguous() else None

    def _along(self, chain: Chain, batch: Batch, k: int) -> tuple[Params, dict[str, list[Pairs]], Tensor]:
        """What :meth:`_gradient` gives, by the layers of a chain."""
        with vmap.outside():
            x = self._inputs(batch)
            for weight in self.weights.values():
                weight.at_step(k)
            ready = None if self.ready is None else self.ready[k]
            passed = chain.passed(x.flatten(2), self.dense, self.weights, ready)
            outputs = passed[-1].detach().requires_grad_()
        with torch.enable_grad(), Watch({}, {}, self.clients, self.batches.length):
            values = self._plain(self.trainer.model.losses_of(vmap.each(outputs), batch))
        mask = self._plain(batch["mask"]) if "mask" in batch else None
        with vmap.outside():
            d, loss = _derivative_of_mean(values, outputs, mask)
            return *chain.gradient(d, passed, self.dense, self.weights), loss

    def _gradient(self, batch: Batch, k: int) -> tuple[Params, dict[str, list[Pairs]], Tensor] | None:
        """∇loss by the dense weights, the pairs of the others, and the loss, of every client."""
        with vmap.outside():
            for weight in self.weights.values():
                weight.at_step(k)
            leaves = {n: x.detach().requires_grad_() for n, x in self.dense.items()}
            stand_ins = {n: w.start.detach().requires_grad_() for n, w in self.weights.items()}
        given = stand_ins | {n: vmap.each(x) for n, x in leaves.items()} | self.buffers
        watch = Watch({id(x): n for n, x in stand_ins.items()}, self.weights, self.clients, self.batches.length)
        loss = _without(self.loss, self.weights) if isinstance(self.loss, Proximal) else self.loss
        with torch.enable_grad(), watch:
            values = self._plain(loss(given, batch))
        self.unsuited |= watch.unsuited
        if self.unsuited:
            return None
        by: list[Any] = [*leaves.values(), *stand_ins.values(), *(use.edge for use in watch.uses)]
        with vmap.outside():
            found = derivatives_of_each(values, by)
            of_leaves, of_stand_ins = found[: len(leaves)], found[len(leaves) : len(leaves) + len(stand_ins)]
            self.unsuited |= {n for n, g in zip(stand_ins, of_stand_ins, strict=True) if g is not None}
            if self.unsuited:
                return None
            gradient = {
                n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), of_leaves, strict=True)
            }
            pairs: dict[str, list[Pairs]] = {n: [] for n in self.weights}
            for use, g in zip(watch.uses, found[len(leaves) + len(stand_ins) :], strict=True):
                if g is not None:
                    pairs[use.name].append(Pairs(use.inputs, g))
            values = values.detach()
            if isinstance(self.loss, Proximal):
                values = values + _pull(self.loss, self.weights, np.full(self.clients, k))
            return gradient, pairs, values

    def _step(self, k: int, gradient: Params, pairs: dict[str, list[Pairs]], values: Tensor) -> None:
        """The optimizer's step k, for the clients that take it."""
        now = None if self.active is None else self.active[:, k]
        if self.trainer.clip is not None:
            gradient, pairs = _clipped(gradient, pairs, self.trainer.clip)
        if now is not None:
            pairs = {n: [p._replace(gradients=_where(now, p.gradients, 0)) for p in ps] for n, ps in pairs.items()}
            gradient = {n: _where(now, g, 0) for n, g in gradient.items()}
            values = _where(now, values, 0)
        for n, weight in self.weights.items():
            weight.add(pairs[n], k)
        if self.want_gradient:
            self.total_gradient = tree.add(self.total_gradient, gradient)
        if self.dense_correction:
            gradient = tree.add(gradient, self.dense_correction)
        direction, memory = self.trainer.optimizer.direction(gradient, self.memory, self.dense)
        moved = tree.add(self.dense, direction, -self.rate)
        self.dense = moved if now is None else _where(now, moved, self.dense)
        self.memory = memory if now is None else _where(now, memory, self.memory)
        self.total = self.total + values

    def _trained(self) -> Trained:
        """Where each client is after the steps it has taken."""
        length, active = self.batches.length, self.active
        steps = np.full(self.clients, length) if active is None else active.cpu().numpy().sum(1)
        ends: Params = {n: Factored(w.factors(w.path, steps)) for n, w in self.weights.items()}
        ends |= {n: vmap.each(x) for n, x in self.dense.items()}
        gradients: Params = {}
        if self.want_gradient:
            gradients = {n: Factored(w.factors(w.seen, steps)) for n, w in self.weights.items()}
            gradients |= {n: vmap.each(x) for n, x in self.total_gradient.items()}
        taken, _ = vmap.made_of(self.batches.steps)
        with vmap.outside():
            mean = self.total / taken
        params = {n: ends[n] for n in self.trainer.model.trainable} | self.buffers
        return Trained(params, vmap.each(mean), self.batches.steps, gradients or None)

    def _plain(self, x: Tensor) -> Tensor:
        """What x is made of, with a first dimension over clients."""
        plain, each = vmap.made_of(x)
        if each:
            return plain
        with vmap.outside():
            return plain.expand(self.clients, *plain.shape)


def _derivative_of_mean(values: Tensor, by: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The derivative of each client's mean of values [clients, batch], those that the mask leaves, and the mean."""
    if mask is None:
        share, means = torch.full_like(values, 1 / values.shape[1]), values.detach().mean(1)
    else:
        share = mask.to(values.dtype) / mask.sum(1, keepdim=True).clamp(min=1)
        means = (torch.where(mask, values.detach(), 0.0) * share).sum(1)
    if not values.requires_grad:
        return torch.zeros_like(by), means
    (found,) = torch.autograd.grad(values, by, share, allow_unused=True)
    return torch.zeros_like(by) if found is None else found, means


def _without(loss: Proximal, weights: Mapping[str, Weight]) -> Loss:
    """The loss with the pull of dense weights towards the anchor, and no other."""
    dense = {n: a for n, a in loss.anchor.items() if n not in weights}
    return replace(loss, anchor=dense) if dense else loss.loss


def _pull(loss: Proximal, weights: Mapping[str, Weight], taken: NDArray[np.int64]) -> Tensor | float:
    """μ/2·‖x − anchor‖² over the weights in factors, of each client that has taken so many steps.

    The gradient of it is in the weights' coefficients.
    """
    pulled = [weights[n] for n in loss.anchor if n in weights]
    if not pulled:
        return 0.0
    squares = [w.factors(w.path, taken).plus(0, -1.0).squares() for w in pulled]
    return 0.5 * loss.mu * torch.stack(squares).sum(0)


def _clipped(gradient: Params, pairs: dict[str, list[Pairs]], bound: float) -> tuple[Params, dict[str, list[Pairs]]]:
    """Each client's gradient, bounded in norm."""
    squares = [g.flatten(1).square().sum(1) for g in gradient.values()]
    for uses in pairs.values():
        for i, (inputs, deltas) in enumerate(uses):
            for j, (others, theirs) in enumerate(uses[: i + 1]):
                products = (torch.bmm(inputs, others.mT) * torch.bmm(deltas, theirs.mT)).sum((1, 2))
                squares.append((1 if i == j else 2) * products)
    factor = (bound / (torch.stack(squares).sum(0).clamp(min=0).sqrt() + 1e-12)).clamp(max=1.0)
    own = {n: g * _like(factor, g) for n, g in gradient.items()}
    return own, {n: [Pairs(a, d * _like(factor, d)) for a, d in uses] for n, uses in pairs.items()}


def _where(now: Tensor, a: Any, b: Any) -> Any:
    """a for the clients that are active now, else b; leaf by leaf in trees."""
    if isinstance(a, Mapping):
        return {n: _where(now, x, b[n]) for n, x in a.items()}
    return torch.where(_like(now, a), a, b)


def _like(x: Tensor, y: Tensor) -> Tensor:
    """One number for each client, in a shape that goes with y."""
    return x.view(-1, *(1,) * (y.ndim - 1))
