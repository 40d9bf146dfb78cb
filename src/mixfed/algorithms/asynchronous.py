"""Methods that take updates whenever they come: FedAsync, FedBuff and CA2FL.

τ is an update's staleness: the server versions that passed between sending the model and receiving the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from mixfed.algorithms.fedavg import fedavg
from mixfed.core import algorithm as core
from mixfed.core import optim, tree
from mixfed.core.algorithm import CLIENTS, Algorithm, Message, Private, Reply, Server, State, Upload
from mixfed.core.batches import Batches
from mixfed.core.optim import Optimizer
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.errors import InputError
from mixfed.ranges import CountOrNone, NotNegative, SomeShare, within_ranges

Step = Callable[[State, Sequence[Reply], Server], State]
Rule = Literal["constant", "polynomial", "hinge"]
Discount = Callable[[int], float]
"""s(τ): what an update of this staleness counts."""


@within_ranges()
def discount(rule: Rule, a: NotNegative = 0.5, b: NotNegative = 4.0) -> Discount:
    """s(τ) = 1 (constant), (1 + τ)^−a (polynomial), or 1 if τ ≤ b, else 1/(a(τ − b) + 1) (hinge)."""
    rules: dict[str, Discount] = {
        "constant": lambda tau: 1.0,
        "polynomial": lambda tau: float((1.0 + tau) ** -a),
        "hinge": lambda tau: 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0),
    }
    if rule not in rules:
        raise InputError(f"There is no staleness rule '{rule}'; choose one of {', '.join(rules)}.")
    return rules[rule]


@within_ranges()
def fedasync(
    trainer: LocalTrainer,
    *,
    alpha: SomeShare = 0.6,
    rule: Rule = "polynomial",
    a: NotNegative = 0.5,
    b: NotNegative = 4.0,
) -> Algorithm:
    """FedAsync (Xie et al., 2019): x ← (1 − α_τ)·x + α_τ·x_client with α_τ = α·s(τ), for every update by itself.

    It mixes models, so a client sends its model up, not the change. α itself never decays.
    """
    weigh = discount(rule, a, b)

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        params = state["params"]
        for passed, reply in enumerate(replies):
            share = alpha * weigh(reply.staleness + passed)
            params = tree.add(params, mixed_towards(params, reply.values["model"]), share)
        return state | {"params": params}

    return taking_late(sending_models(fedavg(trainer, name="fedasync")), step, buffer=1)


@within_ranges()
def fedbuff(
    trainer: LocalTrainer,
    *,
    buffer: CountOrNone = 10,
    server: Optimizer | None = None,
    rule: Rule = "polynomial",
    a: NotNegative = 0.5,
    b: NotNegative = 4.0,
) -> Algorithm:
    """FedBuff (Nguyen et al., 2022): once M updates are buffered, x ← x + η_s·(1/M)·Σ Δᵢ·s(τᵢ), s(τ) = 1/√(1 + τ).

    It divides by M, not by the sum of the discounts, and every client counts alike. ``buffer = 0`` makes a step of all
    that arrived in a round. Only sums over clients of one staleness are used.
    """
    optimizer, weigh = optim.given(server, "The optimizer of the server"), discount(rule, a, b)
    base = counting_alike(fedavg(trainer, server=optimizer, name="fedbuff"))

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        count = sum(r.weight for r in replies)
        shares = [r.weight * weigh(r.staleness) / count for r in replies]
        delta = tree.combine([r.values["delta"] for r in replies], shares)
        return moved(base, optimizer, state, delta, server)

    return taking_late(base, step, buffer=buffer)


@within_ranges()
def ca2fl(trainer: LocalTrainer, *, buffer: CountOrNone = 10, server: Optimizer | None = None) -> Algorithm:
    """CA2FL (Wang et al., 2024): every client's last update hᵢ is cached and stands in for it.

    v = h̄ + (1/M)·Σ(Δᵢ − hᵢ) with h̄ and hᵢ from before this buffer, x ← x + η_s·v; then hᵢ ← Δᵢ and h̄ = Σ hᵢ/N over all
    N clients, zero for those not seen yet. The cache grows to N models; it is kept in main memory, off the device.
    Averaged buffers (BatchNorm's statistics) are no gradients to calibrate: of them it takes the mean of the changes
    that came.
    """
    optimizer = optim.given(server, "The optimizer of the server")
    base = counting_alike(fedavg(trainer, server=optimizer, name="ca2fl"))
    model = trainer.model

    def init(params: Params) -> State:
        return base.init(params) | {"mean": tree.zeros(model.trained(params)), "cache": {}}

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        cache, mean = dict(state["cache"]), state["mean"]
        news: list[Params] = []
        shares = [1.0 / len(replies)] * len(replies)
        statistics = [{n: x for n, x in r.values["delta"].items() if n in model.buffers} for r in replies]
        for reply in replies:
            update = {n: x for n, x in reply.values["delta"].items() if n not in model.buffers}
            client = str(reply.clients[0])
            before = {n: x.to(update[n].device) for n, x in cache.get(client, {}).items() if n in update}
            news.append(tree.sub(update, before) if before else update)
            cache[client] = {n: x.to("cpu", copy=True) for n, x in update.items()}  # a view would keep a whole chunk
        calibrated = tree.combine([*news, mean], [*shares, 1.0]) | tree.combine(statistics, shares)
        mean = tree.combine([mean, *news], [1.0, *[1.0 / server.clients[CLIENTS]] * len(replies)])
        return moved(base, optimizer, state, calibrated, server) | {"mean": mean, "cache": cache}

    def restore(state: State, device: torch.device) -> State:
        rest = {name: x for name, x in state.items() if name != "cache"}
        return base.restore(rest, device) | {"cache": state["cache"]}

    moves_all = replace(base.rows, untouched_stay=False)  # the cached mean moves rows that nobody touched
    return replace(taking_late(base, step, buffer=buffer), init=init, restore=restore, uploads="each", rows=moves_all)


def taking_late(base: Algorithm, step: Step, *, buffer: int = 0) -> Algorithm:
    """The algorithm with this step, made of so many updates, however late they come."""
    return replace(base, step=step, lateness=replace(base.lateness, late="use", buffer=buffer))


def moved(base: Algorithm, optimizer: Optimizer, state: State, delta: Params, server: Server) -> State:
    """The state after x ← ServerOpt(x, −Δ)."""
    params, memory = core.server_step(base.model, optimizer, state["params"], delta, state["server"], server.round)
    return state | {"params": params, "server": memory}


def counting_alike(base: Algorithm) -> Algorithm:
    """The algorithm with uploads that all have the weight 1."""

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        upload, private = base.client(message, private, batches)
        return replace(upload, weight=torch.ones_like(upload.weight)), private

    return replace(base, client=client)


def sending_models(base: Algorithm) -> Algorithm:
    """The algorithm with clients that send up where they ended, "model", instead of the change, each by itself."""

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        upload, kept = base.client(message, private, batches)
        start = core.received(message["params"], private)
        ends = {n: start[n] + d for n, d in upload.values["delta"].items()}
        return Upload({"model": ends}, torch.ones_like(upload.weight)), kept

    return replace(base, client=client, uploads="each", rows=replace(base.rows, untouched_stay=False))


def mixed_towards(params: Params, model: Params) -> Params:
    """model − x on the leaves that came up, in the server's precision."""
    return {n: m.to(params[n].dtype) - params[n] for n, m in model.items()}
