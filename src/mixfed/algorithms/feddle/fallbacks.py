"""Where Feddle's search begins: at the coefficients that a federated method would give, or after its whole step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mixfed.algorithms.asynchronous import mixed_towards
from mixfed.algorithms.feddle.atlas import unflat
from mixfed.core import algorithm as core
from mixfed.core import tree
from mixfed.core.algorithm import CLIENTS, Algorithm, Reply, Server, State
from mixfed.core.model import Model
from mixfed.core.tree import Params
from mixfed.errors import InputError
from mixfed.transforms.travel import what_travels

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
class Arrived:
    """Replies, their updates as vectors, the place of each among the anchors (−1: none) and all anchors' factors."""

    replies: Sequence[Reply]
    updates: list[Tensor]
    places: list[int]
    factors: Tensor


Begun = Callable[[State, Arrived, Server], tuple[State, Tensor]]
"""The state in which a search begins, and the fallback's coefficients there."""


def by_coefficients(model: Model, coefficients_of: Fallback) -> Begun:
    """The search begins at x, moved by what is no direction of the search: statistics, and updates without room."""
    names = model.trainable

    def begun(state: State, arrived: Arrived, server: Server) -> tuple[State, Tensor]:
        params, given = state["params"], coefficients_of(arrived.replies)
        start = torch.zeros_like(arrived.factors)
        for update, anchor, c in zip(arrived.updates, arrived.places, given, strict=True):
            if anchor < 0:
                params = tree.add(params, unflat(update, params, names), c)
            elif bool(arrived.factors[anchor] > 0):
                start[anchor] = c / arrived.factors[anchor]
        statistics = [{n: x for n, x in r.values["delta"].items() if n in model.buffers} for r in arrived.replies]
        return {"params": core.with_statistics(model, params, tree.combine(statistics, given))}, start

    return begun


def by_algorithm(fallback: Algorithm) -> Begun:
    """The search begins where the algorithm's step ends."""
    return lambda state, arrived, server: (
        fallback.step(state, arrived.replies, server),
        torch.zeros_like(arrived.factors),
    )


def check_fallback(fallback: Algorithm, model: Model, *, is_start: bool) -> None:
    """Refuses what cannot be merged with, or would have no part (the search does not start at it)."""
    if fallback.model is not model:
        raise InputError("Feddle and its fallback train one model; build their trainers from the same Model.")
    if tuple(fallback.batching) != (CLIENTS,):
        raise InputError(f"Feddle merges the updates of one population of clients, and {fallback.name} has another.")
    if fallback.rows:
        raise InputError(f"Clients of {fallback.name} exchange rows; put exchange_rows around feddle, not inside.")
    if not {"delta", "model"} & set(what_travels(fallback).up()):
        raise InputError(f"The clients of {fallback.name} send neither a change nor a model, so nothing can be merged.")
    if not is_start:
        raise InputError(f"Without the fallback's start {fallback.name} would have no part; leave the fallback out.")


def change_in(reply: Reply, params: Params) -> Params:
    """The direction in which a reply points, in the server's precision: its change, or the way to its model."""
    if "delta" in reply.values:
        return core.as_server_copy(reply.values["delta"], params)
    return mixed_towards(params, reply.values["model"])
