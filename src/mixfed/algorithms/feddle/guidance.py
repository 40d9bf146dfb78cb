"""What guides a search of coefficients: models x + Σ cₘāₘ, and losses that need not be the task's.

Data of another domain guides by a head of its own: the model is body and linear head, a fresh head is fitted to the
server's labels (or, without labels, to how its images were turned), and its loss says which bodies are good.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from mixfed import rng
from mixfed.algorithms.feddle.atlas import Atlas, flat, unflat
from mixfed.core import algorithm as core
from mixfed.core import optim, tree
from mixfed.core.algorithm import CENTRE, Server
from mixfed.core.batches import Batches, Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Loss, Model, masked_mean
from mixfed.core.train import gradient_of
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.errors import InputError, explained
from mixfed.ranges import Count, NotNegative, within_ranges

Objective = Literal["in_domain", "out_of_domain", "rotation"]


@dataclass(frozen=True)
class Merged:
    """The models x′ = x + Σ cₘāₘ, where āₘ is an anchor times its factor.

    With one ``more`` direction, which is not of the atlas, its factor and its coefficient are the last.
    """

    model: Model
    params: Params
    atlas: Atlas
    factors: Tensor
    more: Tensor | None = None

    @cached_property
    def start(self) -> Tensor:
        """x as a vector."""
        return flat(self.params, self.model.trainable)

    def at(self, coefficients: Tensor) -> Params:
        """x + Σ cₘāₘ; its leaves share one piece of memory."""
        weights = coefficients * self.factors
        start = self.start if self.more is None else self.start + self.more * weights[-1]
        moved = self.atlas.combine(weights[: len(self.atlas)], start)
        return self.params | unflat(moved, self.params, self.model.trainable)

    def gradient(self, guide: Guide, coefficients: Tensor, batch: Batch) -> Tensor:
        """∂ℓ/∂cₘ = ⟨∂ℓ/∂x′, āₘ⟩: one gradient of the model, then a projection on every anchor.

        The parameters in the guide's head replace the model's own, which then have no part in the gradient.
        """
        names, model = self.model.trainable, self.model
        there = tree.cast(self.at(coefficients), model.dtype)
        weights = {n: there[n] for n in names if n not in guide.head}
        buffers = tree.clone({n: there[n] for n in model.buffers})
        gradient, _, _ = gradient_of(lambda p, b: guide.loss(p | guide.head, b), weights, buffers, batch)
        whole = {n: gradient[n] if n in gradient else torch.zeros_like(self.params[n]) for n in names}
        slope = flat(core.as_server_copy(whole, self.params), names)
        along = self.atlas.project(slope)
        return self.factors * (along if self.more is None else torch.cat([along, (self.more @ slope)[None]]))


@dataclass(frozen=True)
class Guide:
    """A loss, and a head in place of the model's own where it is of another domain."""

    loss: Loss
    head: Params = field(default_factory=dict)


def surrogate(model: Model, objective: Objective) -> Loss:
    """The loss of the model with another head: cross-entropy of the labels, or of the quarter turns of the images."""

    def loss(params: Params, batch: Batch) -> Tensor:
        if objective == "rotation":
            batch = _turned(batch)
        return masked_mean(cross_entropy(model.outputs(params, batch, training=True), batch), batch.get("mask"))

    return loss


@within_ranges()
@dataclass(frozen=True)
class Head:
    """How a head of the other domain is fitted: its ``name`` (left out: the last linear layer), Adam's rate, steps."""

    name: str = ""
    rate: NotNegative = 1e-2
    steps: Count = 50

    def fitted(self, model: Model, objective: Objective, body: Params, batching: Batching, server: Server) -> Guide:
        """θ* = argmin_θ h(D_S, [body; θ])   (Eq. 8), from zero on mini-batches of the server's data."""
        name, loss = head_of(model, self.name), surrogate(model, objective)
        classes = 4 if objective == "rotation" else _classes(server)
        theta = {n: body[n].new_zeros(classes, *body[n].shape[1:]) for n in model.trainable if n.startswith(f"{name}.")}
        batches = server.batches(replace(batching, steps=self.steps, epochs=None))
        _check_head(model, name, body, theta, next(iter(batches))[0])
        rest = {n: x for n, x in body.items() if n not in theta}
        buffers = {n: body[n] for n in model.buffers}
        optimizer = optim.adam(self.rate)

        def fit(batches: Batches) -> Params:
            found, memory = theta, optimizer.init(theta)
            for batch, _ in batches:
                gradient, _, _ = gradient_of(lambda p, b: loss(rest | tree.clone(buffers) | p, b), found, {}, batch)
                found, memory = optimizer.step(found, gradient, memory)
            return found

        return Guide(loss, server.work("head", fit, batches))


def head_of(model: Model, name: str = "") -> str:
    """The name of the linear head: the one given, or the last linear layer."""
    linear = [n for n, m in model.module().named_modules() if isinstance(m, nn.Linear)]
    if not linear or (name and name not in linear):
        raise InputError("Data of another domain guides a model that ends in a linear head; name it with 'head'.")
    return name or linear[-1]


def _check_head(model: Model, name: str, body: Params, theta: Params, batch: Batch) -> None:
    """Refuses a linear layer that is not the last one to work: with one more output, so has the model."""
    one = {n: x if n == "key" else x[:1] for n, x in batch.items()}
    wider = {n: torch.cat([x, x[:1]]) for n, x in theta.items()}
    with torch.no_grad():
        with explained(f"The centre cannot work on '{CENTRE}'"):
            model.outputs(tree.cast(body, model.dtype), one, training=False)
        try:
            answer = model.outputs(body | wider, one, training=False)
        except RuntimeError:
            answer = None
    if answer is None or answer.shape[-1] != len(next(iter(wider.values()))):
        raise InputError(f"The layer '{name}' is not the model's linear head; name the last layer with 'head'.")


def _classes(server: Server) -> int:
    data = server.central.get(CENTRE)
    if data is None or "y" not in data.arrays:
        raise InputError("The out-of-domain objective needs labels 'y' at the centre; use rotation for data without.")
    return int(data.arrays["y"].max()) + 1


def _turned(batch: Batch) -> Batch:
    """Every image turned by some quarters, drawn from the batch's key, which become its label."""
    images = batch["x"]
    if images.ndim != 4 or images.shape[-1] != images.shape[-2]:
        raise InputError("The rotation objective turns square images, and the centre's examples have another shape.")
    quarters = rng.tensor_bits(batch["key"], torch.arange(len(images), device=images.device)) & 3
    turned = torch.stack([torch.rot90(x, int(k), (-2, -1)) for x, k in zip(images, quarters, strict=True)])
    return batch | {"x": turned, "y": quarters}
