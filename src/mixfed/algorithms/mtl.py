"""Multi-task learning: every client has a model of its own, held close to the mean of all (Smith et al., 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mixfed.core import algorithm as core
from mixfed.core import tree
from mixfed.core.algorithm import CLIENTS, Algorithm, Message, OwnParts, Private, Reply, Server, State, Upload
from mixfed.core.batches import Batches
from mixfed.core.model import Loss
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.ranges import NotNegative, within_ranges


@within_ranges()
def mtl(trainer: LocalTrainer, *, lambda1: NotNegative = 0.01, lambda2: NotNegative = 0.0) -> Algorithm:
    """Mean-regularised multi-task learning: minimises Σ_m f_m(w_m) + λ₁·tr(WΩWᵀ) + λ₂·‖W‖²_F.

    W = [w_1 … w_M] and Ω = (I − 11ᵀ/M)², which is I − 11ᵀ/M because that is a projection; so tr(WΩWᵀ) = Σ‖w_m − w̄‖²,
    and its gradient in w_m is 2λ₁(w_m − w̄). Within a round a client holds the mean w̄ that it received fixed. The
    server keeps w̄ over all M clients (those not yet asked are at the common start): w̄ ← w̄ + Σ_{m∈S} Δ_m / M.
    """
    model = trainer.model

    def broadcast(state: State, server: Server) -> tuple[dict[str, Message], State]:
        mean = tree.cast(model.trained(state["params"]), model.dtype)
        return {CLIENTS: Message({"mean": mean}, server.round)}, state

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        start = private["params"]
        loss = mean_regularised(trainer.loss or model.loss, message["mean"], lambda1, lambda2)
        end = trainer.train(start, batches, message.round, loss=loss).params
        change = {n: end[n] - start[n] for n in model.trainable}
        kept = {"params": core.own_model(model, start, end)}
        return Upload({"delta": change}, torch.ones_like(batches.examples)), kept

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        share = sum(r.weight for r in replies) / server.clients[CLIENTS]
        return {"params": tree.add(state["params"], core.mean(replies, "delta"), share)}

    return Algorithm(
        "mtl",
        model,
        init=lambda params: {"params": params},
        broadcast=broadcast,
        step=step,
        client=client,
        batching={CLIENTS: trainer.batching},
        own=OwnParts(lambda params: {"params": tree.cast(params, model.dtype)}, lambda params, own: own["params"]),
    )


def mean_regularised(loss: Loss, mean: Params, lambda1: float, lambda2: float) -> Loss:
    """f(w) + λ₁·‖w − w̄‖² + λ₂·‖w‖² over the leaves of the mean."""

    def wrapped(params: Params, batch: Batch) -> Tensor:
        apart = torch.stack([(params[n] - m).square().sum() for n, m in mean.items()]).sum()
        large = torch.stack([params[n].square().sum() for n in mean]).sum()
        return loss(params, batch) + lambda1 * apart + lambda2 * large

    return wrapped
