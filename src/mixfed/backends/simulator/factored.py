"""Training a chunk of clients without forming their own copies of wide linear layers.

A client that takes K steps on batches of B changes a linear layer by a matrix of rank K·B at most. With the inputs A
and output gradients D of its examples so far, F.linear is one product with the shared W for the whole chunk and two
small ones for each client, forward and backward:

    z = x·Wᵀ − η·(x·Aᵀ)·D        dx = δ·W − η·(δ·Dᵀ)·A

A step's (x, δ) join A and D, and the weight's gradient is never formed. Weight decay, momentum, a constant correction
and a proximal term make other coefficients than −η, the same for all clients at a step (:func:`coefficients`).

The loss is computed under vmap as ever, with a tensor in the place of each such weight whose use in F.linear is
intercepted. A weight that is used in another way, or so often that factors do not pay, is trained as vmap does it; so
are biases, norms, convolutions and all that clients do not start from together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from mixfed.core import tree
from mixfed.core.batches import Batches
from mixfed.core.factors import Factored, Factors, Pairs
from mixfed.core.model import Loss
from mixfed.core.optim import Optimizer
from mixfed.core.train import LocalTrainer, Proximal, Trained
from mixfed.core.tree import Params
from mixfed.models import vmap

Paths = tuple[NDArray[np.float64], NDArray[np.float64]]
Pull = Callable[[], Tensor]

LINEAR_RULES = ("sgd", "sgd+decay", "momentum", "nesterov")
"""Optimizers whose weights are sums of the start and of gradients, with coefficients that no data changes."""


def pays(shape: tuple[int, ...], rank: int) -> bool:
    """Whether so many pairs of vectors are less than the matrix: rank·(in + out) < in·out."""
    return len(shape) == 2 and rank * (shape[0] + shape[1]) < shape[0] * shape[1]


def train(
    trainer: LocalTrainer,
    params: Params,
    batches: Batches,
    rate: float,
    correction: Params | None,
    loss: Loss,
    *,
    want_gradient: bool = False,
) -> Trained | None:
    """What :meth:`LocalTrainer.train` does, under vmap. None: no weight can be factored.

    The result has :class:`Factored` weights. A client's steps are the first ones of the batches.
    """
    key, each = vmap.made_of(batches.key)
    if not (batches.vectorised and each and batches.fields) or trainer.optimizer.rule not in LINEAR_RULES:
        return None
    if batches.tables:
        return None  # lookups of tables that came by rows are guarded elsewhere
    if trainer.clip is not None and isinstance(loss, Proximal):
        return None  # a norm over factors and pull together is not worth its code
    start = tree.cast(params, trainer.model.dtype)
    examples = batches.length * next(iter(batches.fields.values())).shape[1]
    names = {n for n in trainer.model.trainable if pays(start[n].shape, examples) and _alike(n, start, correction)}
    names = {n for n in names if start[n].dtype in (torch.float32, torch.float64)}
    if isinstance(loss, Proximal):
        names = {n for n in names if n not in loss.anchor or loss.anchor[n] is start[n]}
    while names:
        run = _Run(trainer, start, batches, rate, correction or {}, loss, names, len(key), want_gradient)
        found = run.train()
        if found is not None:
            return found
        names -= run.unsuited
    return None


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


def _alike(name: str, start: Params, correction: Params | None) -> bool:
    """Whether all clients start from the same, and are corrected in the same way."""
    given = [start[name], *([correction[name]] if correction and name in correction else [])]
    return not any(vmap.made_of(x)[1] for x in given)


@dataclass
class _Weight:
    """A weight of all clients of a chunk: the start they share, and the pairs of each."""

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

    def applied(self, x: Tensor) -> Tensor:
        """x·Wᵢᵀ for x [clients, n, in]."""
        z = F.linear(x, self.shared)
        for (inputs, gradients), scale in self.own:
            near = torch.bmm(x, inputs.mT)
            if isinstance(scale, Tensor):
                z = torch.baddbmm(z, near * scale, gradients)
            else:
                z = torch.baddbmm(z, near, gradients, alpha=scale)
        return z

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


@dataclass
class _Run:
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
        model, optimizer, batches = self.trainer.model, self.trainer.optimizer, self.batches
        active = None if batches.active is None else self._plain(batches.active)
        with vmap.outside():
            weights = self._weights()
        dense = {n: self._plain(self.start[n]) for n in model.trainable if n not in weights}
        correction = {n: vmap.made_of(c)[0] for n, c in self.correction.items() if n in dense}
        memory = optimizer.init(dense)
        buffers = {n: vmap.each(self._plain(self.start[n]).clone()) for n in model.buffers}
        want_gradient = self.want_gradient and not optimizer.is_plain_sgd
        total_gradient = tree.zeros(dense) if want_gradient else {}
        total = torch.zeros((), dtype=model.dtype, device=model.device)
        owned = False
        for k, (batch, _) in enumerate(batches):
            before = tree.clone(buffers) if active is not None else buffers
            now = None if active is None else active[:, k]
            found = self._gradient(weights, dense, buffers, batch, k)
            if found is None:
                return None
            gradient, pairs, values = found
            with vmap.outside():
                if self.trainer.clip is not None:
                    gradient, pairs = _clipped(gradient, pairs, self.trainer.clip)
                if now is not None:
                    pairs = {
                        n: [p._replace(gradients=_where(now, p.gradients, 0)) for p in ps] for n, ps in pairs.items()
                    }
                    gradient = {n: _where(now, g, 0) for n, g in gradient.items()}
                    values = _where(now, values, 0)
                for n, weight in weights.items():
                    weight.add(pairs[n], k)
                if want_gradient:
                    total_gradient = tree.add(total_gradient, gradient)
                if correction:
                    gradient = tree.add(gradient, correction)
                direction, remembered = optimizer.direction(gradient, memory, dense)
                if now is None:
                    dense, memory = _moved(dense, direction, -self.rate, in_place=owned), remembered
                else:
                    dense = _where(now, tree.add(dense, direction, -self.rate), dense)
                    memory = _where(now, remembered, memory)
                total = total + values
            owned = now is None
            if now is not None:
                buffers = tree.where(vmap.each(now), buffers, before)
        steps = np.full(self.clients, batches.length) if active is None else active.cpu().numpy().sum(1)
        ends: Params = {n: Factored(w.factors(w.path, steps)) for n, w in weights.items()}
        ends |= {n: vmap.each(x) for n, x in dense.items()}
        gradients: Params = {n: Factored(w.factors(w.seen, steps)) for n, w in weights.items()} if want_gradient else {}
        gradients |= {n: vmap.each(x) for n, x in total_gradient.items()}
        mean = vmap.each(total.expand(self.clients)) / batches.steps
        return Trained({n: ends[n] for n in model.trainable} | buffers, mean, batches.steps, gradients or None)

    def _weights(self) -> dict[str, _Weight]:
        found = {}
        for n in sorted(self.names):
            mu = self.loss.mu if isinstance(self.loss, Proximal) and n in self.loss.anchor else 0.0
            correction = self.correction.get(n)
            paths = coefficients(self.trainer.optimizer, self.rate, self.batches.length, correction is not None, mu)
            found[n] = _Weight(self.start[n], correction, *paths)
        return found

    def _gradient(
        self, weights: Mapping[str, _Weight], dense: Params, buffers: Params, batch: Params, k: int
    ) -> tuple[Params, dict[str, list[Pairs]], Tensor] | None:
        """∇loss by the dense weights, the pairs of the others, and the loss, of every client."""
        with vmap.outside():
            for weight in weights.values():
                weight.at_step(k)
            leaves = {n: x.detach().requires_grad_() for n, x in dense.items()}
            stand_ins = {n: w.start.detach().requires_grad_() for n, w in weights.items()}
        given = stand_ins | {n: vmap.each(x) for n, x in leaves.items()} | buffers
        watch = _Watch({id(x): n for n, x in stand_ins.items()}, weights, self.clients, self.batches.length)
        loss, pull = self.loss, None
        if isinstance(loss, Proximal):
            loss, pull = _apart(loss, weights, np.full(self.clients, k))
        with torch.enable_grad(), watch:
            values = self._plain(loss(given, batch))
        self.unsuited |= watch.unsuited
        if self.unsuited:
            return None
        with vmap.outside():
            by: list[Any] = [*leaves.values(), *stand_ins.values(), *(use.edge for use in watch.uses)]
            ones = torch.ones_like(values)  # clients have nothing in common: the gradient of the sum is each one's
            found = (
                torch.autograd.grad(values, by, ones, allow_unused=True) if values.requires_grad else (None,) * len(by)
            )
            of_leaves, of_stand_ins = found[: len(leaves)], found[len(leaves) : len(leaves) + len(stand_ins)]
            self.unsuited |= {n for n, g in zip(stand_ins, of_stand_ins, strict=True) if g is not None}
            if self.unsuited:
                return None
            gradient = {
                n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), of_leaves, strict=True)
            }
            pairs: dict[str, list[Pairs]] = {n: [] for n in weights}
            for use, g in zip(watch.uses, found[len(leaves) + len(stand_ins) :], strict=True):
                if g is not None:
                    pairs[use.name].append(Pairs(use.inputs, g))
            values = values.detach()
            return gradient, pairs, values if pull is None else values + pull()

    def _plain(self, x: Tensor) -> Tensor:
        """What x is made of, with a first dimension over clients."""
        plain, each = vmap.made_of(x)
        if each:
            return plain
        with vmap.outside():
            return plain.expand(self.clients, *plain.shape)


@dataclass(frozen=True)
class _Use:
    """A use of a weight in a step: its inputs, and where the gradient of its outputs is to be had."""

    name: str
    inputs: Tensor
    edge: GradientEdge


class _Watch(TorchFunctionMode):
    """While active, F.linear with a weight that is known by identity is computed from factors, and ``uses`` collects
    its inputs. Weights that are met in another place, or too often, are ``unsuited``."""

    def __init__(self, names: dict[int, str], weights: Mapping[str, _Weight], clients: int, steps: int) -> None:
        super().__init__()
        self.names, self.weights, self.clients, self.steps = names, weights, clients, steps
        self.uses: list[_Use] = []
        self.unsuited: set[str] = set()
        self.ranks = dict.fromkeys(weights, 0)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if (func in _BY_NUMBER and not kwargs.get("inplace")) or (
            func in _LOSSES and kwargs.get("reduction") == "none"
        ):
            found = self._by_example(func, args, kwargs)
            if found is not None:
                return found
        for x in (*args, *kwargs.values()):
            for one in x if type(x) in (list, tuple) else (x,):
                if id(one) in self.names and func not in _HARMLESS:
                    self.unsuited.add(self.names[id(one)])
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name = self.names.get(id(weight))
        own = name is None and vmap.is_at_this_level(weight) and vmap.is_at_this_level(input)
        if not (own if name is None else self._is_suited(name, input)):
            return F.linear(input, weight, bias)
        x, each = vmap.made_of(input)
        b, each_b = vmap.made_of(bias) if bias is not None else (None, False)
        w, each_w = vmap.made_of(weight)
        if name is None and not each_w:
            return F.linear(input, weight, bias)
        with vmap.outside():
            x = x if each else x.expand(self.clients, *x.shape)
            rows = x.reshape(self.clients, -1, x.shape[-1])
            b = b.unsqueeze(1) if b is not None and each_b else b
            if name is not None:
                z = self.weights[name].applied(rows)
                z = z if b is None else z + b
            else:
                z = torch.bmm(rows, w.mT) if b is None else torch.baddbmm(b, rows, w.mT)
            if name is not None:
                if not z.requires_grad:
                    z = z.requires_grad_().clone()  # what comes next may write into it, but not into a leaf
                self.uses.append(_Use(name, rows.detach(), get_gradient_edge(z)))
            z = z.view(*x.shape[:-1], -1)
        return vmap.each(z)

    def _by_example(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The function of all clients' examples in a row, in a fraction of what the operators of vmap take."""
        fewest = 2 if func is F.cross_entropy else 1  # its first dimension is examples only if there is another
        if not all(isinstance(x, Tensor) and vmap.is_at_this_level(x) for x in args) or args[0].ndim < fewest:
            return None
        plain = [vmap.made_of(x) for x in args]
        if not all(each for _, each in plain) or any(isinstance(x, Tensor) for x in kwargs.values()):
            return None
        with vmap.outside():
            found = func(*(x.flatten(0, 1) for x, _ in plain), **kwargs)
            found = found.view(self.clients, -1, *found.shape[1:])
        return vmap.each(found)

    def _is_suited(self, name: str, x: Tensor) -> bool:
        """Whether this use leaves the weight in factors; x is one client's."""
        shape = tuple(self.weights[name].start.shape)
        self.ranks[name] += self.steps * (x.numel() // x.shape[-1] if x.numel() else 0)
        suited = (
            vmap.is_at_this_level(x) and x.dtype == self.weights[name].start.dtype and pays(shape, self.ranks[name])
        )
        if not suited:
            self.unsuited.add(name)
        return suited


_BY_NUMBER: frozenset[Any] = frozenset(
    [F.relu, torch.relu, Tensor.relu, torch.tanh, Tensor.tanh, torch.sigmoid, Tensor.sigmoid, F.gelu, F.silu]
)
_LOSSES: frozenset[Any] = frozenset([F.binary_cross_entropy_with_logits, F.cross_entropy])
_HARMLESS: frozenset[Any] = frozenset(
    [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point]
    + [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")]
)


def _apart(loss: Proximal, weights: Mapping[str, _Weight], taken: NDArray[np.int64]) -> tuple[Loss, Pull]:
    """The loss with the pull of dense weights towards the anchor, and the pull of the others, which is in their
    coefficients, as a number for each client that has taken so many steps."""
    dense = {n: a for n, a in loss.anchor.items() if n not in weights}
    pulled = [weights[n] for n in loss.anchor if n in weights]

    def pull() -> Tensor:
        squares = [w.factors(w.path, taken).plus(0, -1.0).squares() for w in pulled]
        return 0.5 * loss.mu * torch.stack(squares).sum(0)

    return replace(loss, anchor=dense) if dense else loss.loss, pull if pulled else lambda: torch.zeros(())


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


def _moved(weights: Params, direction: Params, scale: float, *, in_place: bool) -> Params:
    if not in_place:
        return tree.add(weights, direction, scale)
    for n, d in direction.items():
        weights[n].add_(d, alpha=scale)
    return weights


def _where(now: Tensor, a: Any, b: Any) -> Any:
    """a for the clients that are active now, else b; leaf by leaf in trees."""
    if isinstance(a, Mapping):
        return {n: _where(now, x, b[n]) for n, x in a.items()}
    return torch.where(_like(now, a), a, b)


def _like(x: Tensor, y: Tensor) -> Tensor:
    """One number for each client, in a shape that goes with y."""
    return x.view(-1, *(1,) * (y.ndim - 1))
