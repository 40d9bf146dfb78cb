"""Feddle: the server's data guides how client updates are merged (federated dual learning).

The updates of clients are kept as anchors of an atlas, and every round the server searches for the coefficients with
which they are best added to the model. A coefficient may be negative: an update may be walked backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from mixfed import core, optim, rng, tree
from mixfed.algorithms.fedavg import fedavg
from mixfed.atlas import Atlas, added, flat
from mixfed.batches import Batches, Batching
from mixfed.core import CENTRE, Algorithm, Reply, Server, State
from mixfed.errors import InputError
from mixfed.local import LocalTrainer, gradient_of
from mixfed.losses import cross_entropy
from mixfed.measure.ledger import count_flops
from mixfed.model import Batch, Loss, Model, masked_mean
from mixfed.tree import Params

Objective = Literal["in_domain", "out_of_domain", "rotation"]
Fallback = Callable[[Sequence[Reply]], list[float]]
"""The coefficients that a federated method would give to updates that have just come."""


def like_fedbuff(rate: float = 1.0) -> Fallback:
    """η_s/(n·√(1 + τᵢ)) for each of the n new updates."""
    return lambda replies: [rate / (len(replies) * (1.0 + r.staleness) ** 0.5) for r in replies]


def like_fedavg(rate: float = 1.0) -> Fallback:
    """η_s·pᵢ/Σp with pᵢ the weight of the update."""

    def coefficients(replies: Sequence[Reply]) -> list[float]:
        total = sum(r.weight for r in replies)
        return [rate * r.weight / total for r in replies]

    return coefficients


@dataclass(frozen=True)
class Search:
    """How coefficients are searched: Adam on mini-batches of the server's data, and which parts are switched on.

    The switches are those of the paper's ablation (Table 5): ``normalise`` the anchors to the median of their norms,
    replace the anchor of lowest score (``by_score``; else the oldest), start at the fallback's coefficients
    (``fallback_start``; else at zero), and pull towards them with λ (``regularisation``). Without ``active`` the
    fallback's coefficients are final.

    ``objective``: the task's own loss on data like the clients' (in_domain), or on other data the loss of the body with
    a head of its own, fitted first for ``head_steps`` steps, that says the server's labels (out_of_domain) or by how
    many quarter turns an image was turned, which needs no labels (rotation).
    """

    batching: Batching
    objective: Objective = "in_domain"
    learning_rate: float = 1e-3
    regularisation: float = 0.0
    normalise: bool = True
    by_score: bool = True
    fallback_start: bool = True
    active: bool = True
    head: str = ""
    head_rate: float = 1e-2
    head_steps: int = 50

    def __post_init__(self) -> None:
        if self.objective not in ("in_domain", "out_of_domain", "rotation"):
            raise InputError(f"The objective '{self.objective}' is not in_domain, out_of_domain or rotation.")
        if not self.regularisation >= 0 or self.head_steps < 1:
            raise InputError("The search needs a regularisation of at least 0 and 1 or more steps for the head.")


def feddle(
    trainer: LocalTrainer,
    search: Search,
    *,
    atlas: int = 20,
    bits: int = 32,
    fallback: Fallback | None = None,
) -> Algorithm:
    """Feddle: ĉ = argmin_c ℓ(D_S, x + Σ cₘāₘ) + λ/2·Σ(cₘ − c′ₘ)², x ← x + Σ ĉₘāₘ, scores ← |ĉₘ|   (Eq. 4–10).

    A reply becomes an anchor aₘ; āₘ is aₘ scaled to the median of all norms. c′ is what the ``fallback`` (FedBuff)
    would do: η_s/(n·√(1 + τ)) times ‖aₘ‖/median for anchors received since the last search, zero for older ones.
    ``atlas`` is the number of anchors (the paper: twice the clients of a round), ``bits`` how they are stored. Averaged
    buffers (BatchNorm's statistics) are no directions to search in: they follow the fallback.
    """
    model, coefficients_of = trainer.model, fallback or like_fedbuff()
    names = model.trainable
    if search.objective != "in_domain":
        head_of(model, search.head)
    width = sum(int(torch.Size(model.shapes[n]).numel()) for n in names)
    base = fedavg(trainer, name="feddle")

    def init(params: Params) -> State:
        some = params[names[0]]
        empty = Atlas.empty(atlas, width, bits, some.device, some.dtype)
        return {"params": params, "atlas": empty.tree(), "searched": {"coefficients": some.new_zeros(0), "age": 0.0}}

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        params = state["params"]
        unmoved = tree.zeros(model.trained(params))  # for leaves that clients keep to themselves
        updates = [flat(unmoved | core.as_server_copy(r.values["delta"], params), names) for r in replies]
        anchors, places = Atlas(**state["atlas"]).with_updates(updates, server.round, by_score=search.by_score)
        factors = anchors.factors(normalise=search.normalise)
        given = coefficients_of(replies)
        start = torch.zeros_like(factors)
        for place, c in zip(places, given, strict=True):
            if place >= 0 and bool(factors[place] > 0):
                start[place] = c / factors[place]
        found = start
        if search.active:
            found = searched(model, search, params, anchors, factors, start, server)
        moved = params | added(params, names, anchors.combine(found * factors))
        statistics = [{n: x for n, x in r.values["delta"].items() if n in model.buffers} for r in replies]
        moved = tree.add(moved, tree.combine(statistics, given))
        age = float((server.round - anchors.born).mean())
        return {
            "params": moved,
            "atlas": replace(anchors, scores=found.abs()).tree(),
            "searched": {"coefficients": found, "age": age},
        }

    return replace(base, init=init, step=step, uploads="each", late="use", row_wise=False)


def searched(
    model: Model, search: Search, params: Params, atlas: Atlas, factors: Tensor, fallback: Tensor, server: Server
) -> Tensor:
    """ĉ: Adam on the coefficients, from the fallback's (or zero), over a round's batches of the server's data."""
    batches = server.batches(search.batching)
    start = fallback if search.fallback_start else torch.zeros_like(fallback)
    loss: Loss = model.loss
    heads: Params = {}
    if search.objective != "in_domain":
        loss = surrogate(model, search.objective)
        body = params | added(params, model.trainable, atlas.combine(start * factors))
        heads = fitted_head(model, search, loss, tree.cast(body, model.dtype), server)
    optimizer = optim.adam(search.learning_rate)

    def run(batches: Batches) -> Tensor:
        c = {"c": start}
        memory = optimizer.init(c)
        for batch, _ in batches:
            gradient = coefficient_gradient(model, loss, params, atlas, factors, c["c"], batch, heads)
            gradient = gradient + search.regularisation * (c["c"] - fallback)
            c, memory = optimizer.step(c, {"c": gradient}, memory)
        return c["c"]

    with torch.no_grad():
        server.ledger.count_at_server(
            ("feddle", len(atlas)), lambda n: count_flops(lambda: run(batches.first(n))), batches
        )
        return run(batches)


def coefficient_gradient(
    model: Model,
    loss: Loss,
    params: Params,
    atlas: Atlas,
    factors: Tensor,
    coefficients: Tensor,
    batch: Batch,
    heads: Params | None = None,
) -> Tensor:
    """∂ℓ/∂cₘ = ⟨∂ℓ/∂x′, āₘ⟩ at x′ = x + Σ cₘāₘ: one gradient of the model, then a projection on every anchor.

    The parameters in ``heads`` replace the model's own, which then have no part in the gradient.
    """
    names, heads = model.trainable, heads or {}
    there = added(params, names, atlas.combine(coefficients * factors))
    weights = {n: x for n, x in tree.cast(there, model.dtype).items() if n not in heads}
    buffers = tree.clone(tree.cast({n: params[n] for n in model.buffers}, model.dtype))
    gradient, _, _ = gradient_of(lambda p, b: loss(p | heads, b), weights, buffers, batch)
    whole = {n: gradient[n] if n in gradient else torch.zeros_like(params[n]) for n in names}
    return factors * atlas.project(flat(core.as_server_copy(whole, params), names))


def surrogate(model: Model, objective: Objective) -> Loss:
    """The loss of the model with another head: cross-entropy of the labels, or of the quarter turns of the images."""

    def loss(params: Params, batch: Batch) -> Tensor:
        if objective == "rotation":
            batch = _turned(batch)
        return masked_mean(cross_entropy(model.outputs(params, batch, training=True), batch), batch.get("mask"))

    return loss


def fitted_head(model: Model, search: Search, loss: Loss, body: Params, server: Server) -> Params:
    """θ* = argmin_θ h(D_S, [body; θ])   (Eq. 8): a fresh linear head, Adam on mini-batches of the server's data."""
    name = head_of(model, search.head)
    classes = 4 if search.objective == "rotation" else _classes(server)
    theta = {n: body[n].new_zeros(classes, *body[n].shape[1:]) for n in model.trainable if n.startswith(f"{name}.")}
    rest = {n: x for n, x in body.items() if n not in theta}
    optimizer = optim.adam(search.head_rate)
    memory = optimizer.init(theta)
    for batch, _ in server.batches(replace(search.batching, steps=search.head_steps, epochs=None)):
        gradient, _, _ = gradient_of(lambda p, b: loss(p | tree.clone(rest), b), theta, {}, batch)
        theta, memory = optimizer.step(theta, gradient, memory)
    return theta


def head_of(model: Model, name: str = "") -> str:
    """The name of the linear head: the one given, or the last linear layer."""
    linear = [n for n, m in model.module().named_modules() if isinstance(m, nn.Linear)]
    if not linear or (name and name not in linear):
        raise InputError("Data of another domain guides a model that ends in a linear head; name it with 'head'.")
    return name or linear[-1]


def _classes(server: Server) -> int:
    data = server.central.get(CENTRE)
    if data is None or "y" not in data.arrays:
        raise InputError("The out-of-domain objective needs labels 'y' at the centre; use rotation for data without.")
    return int(data.arrays["y"].max()) + 1


def _turned(batch: Batch) -> Batch:
    """Every image turned by some quarters, drawn from the batch's key, which become its label."""
    images = batch["x"]
    if images.ndim != 4:
        raise InputError("The rotation objective turns images, and the examples of the centre have another shape.")
    quarters = rng.tensor_bits(batch["key"], torch.arange(len(images), device=images.device)) & 3
    turned = torch.stack([torch.rot90(x, int(k), (-2, -1)) for x, k in zip(images, quarters, strict=True)])
    return batch | {"x": turned, "y": quarters}
