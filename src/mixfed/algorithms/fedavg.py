"""FedAvg and its relatives: one round, four server optimizers, and the proximal client loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mixfed.core import algorithm as core
from mixfed.core import optim
from mixfed.core.algorithm import (
    CLIENTS,
    Algorithm,
    Lateness,
    Message,
    OwnParts,
    Private,
    Reply,
    RowWise,
    Server,
    State,
    Upload,
)
from mixfed.core.batches import Batches
from mixfed.core.model import Loss
from mixfed.core.optim import Optimizer
from mixfed.core.train import LocalTrainer, Proximal
from mixfed.core.tree import Params
from mixfed.ranges import NotNegative, PartOfOne, Positive, within_ranges

WrapLoss = Callable[[Loss, Params], Loss]
"""Changes a client's loss, given the parameters it started from."""


def fedavg(
    trainer: LocalTrainer, *, server: Optimizer | None = None, wrap: WrapLoss | None = None, name: str = "fedavg"
) -> Algorithm:
    """Federated averaging (McMahan et al., 2017; generalised by Reddi et al., 2021).

    Δ = Σ pᵢΔᵢ / Σ pᵢ with pᵢ the examples that client i processed, then x ← ServerOpt(x, −Δ). The default server
    optimizer, SGD with rate 1, is plain averaging.
    """
    model, server_optimizer = trainer.model, optim.given(server, "The optimizer of the server")

    def init(params: Params) -> State:
        return {"params": params, "server": server_optimizer.init(model.trained(params))}

    def broadcast(state: State, server: Server) -> tuple[dict[str, Message], State]:
        return {CLIENTS: Message({"params": core.sent_down(model, state["params"])}, server.round)}, state

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        start = core.received(message["params"], private)
        loss = wrap(trainer.own_loss, model.trained(start)) if wrap else None
        end = trainer.train(start, batches, message.round, loss=loss).params
        return Upload({"delta": core.change(model, start, end)}, batches.examples), core.kept_private(model, end)

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        delta = core.mean(replies, "delta")
        params, memory = core.server_step(
            model, server_optimizer, state["params"], delta, state["server"], server.round
        )
        return {"params": params, "server": memory}

    return Algorithm(
        name,
        model,
        init,
        broadcast,
        step,
        client,
        batching={CLIENTS: trainer.batching},
        lateness=Lateness(same_in_every_round=trainer.same_in_every_round),
        own=OwnParts(lambda params: core.kept_private(model, params)),
        rows=RowWise(untouched_stay=server_optimizer.is_plain_sgd),
    )


@within_ranges()
def fedprox(trainer: LocalTrainer, *, mu: NotNegative = 0.01, server: Optimizer | None = None) -> Algorithm:
    """FedProx (Li et al., 2020): FedAvg whose clients minimise fᵢ(x) + μ/2·‖x − x⁽ᵗ⁾‖²."""
    return fedavg(trainer, server=server, wrap=lambda loss, start: Proximal(loss, start, mu), name="fedprox")


def fedavgm(trainer: LocalTrainer, *, learning_rate: NotNegative = 1.0, momentum: PartOfOne = 0.9) -> Algorithm:
    """FedAvgM: m ← βm − Δ, x ← x − η_s·m."""
    return fedavg(trainer, server=optim.sgd(learning_rate, momentum=momentum), name="fedavgm")


def fedadam(
    trainer: LocalTrainer,
    *,
    learning_rate: NotNegative = 0.01,
    betas: tuple[PartOfOne, PartOfOne] = (0.9, 0.99),
    epsilon: Positive = 1e-3,
    bias_correction: bool = False,
    initial: NotNegative = 0.0,
) -> Algorithm:
    """FedAdam (Reddi et al., 2021): Adam on the server with −Δ for a gradient, as published without bias correction.

    ``initial`` is the second moment before the first round: ε² = 1e-6 in the paper (its v₋₁ = τ²), 0 unless it is set.
    """
    server = optim.adam(learning_rate, betas=betas, epsilon=epsilon, bias_correction=bias_correction, initial=initial)
    return fedavg(trainer, server=server, name="fedadam")


def fedyogi(
    trainer: LocalTrainer,
    *,
    learning_rate: NotNegative = 0.01,
    betas: tuple[PartOfOne, PartOfOne] = (0.9, 0.99),
    epsilon: Positive = 1e-3,
    initial: NotNegative = 0.0,
) -> Algorithm:
    """FedYogi (Reddi et al., 2021): Yogi on the server; ``initial`` as for FedAdam."""
    server = optim.yogi(learning_rate, betas=betas, epsilon=epsilon, initial=initial)
    return fedavg(trainer, server=server, name="fedyogi")


def fedadagrad(
    trainer: LocalTrainer, *, learning_rate: NotNegative = 0.1, epsilon: Positive = 1e-3, initial: NotNegative = 0.0
) -> Algorithm:
    """FedAdagrad (Reddi et al., 2021): AdaGrad on the server; ``initial`` as for FedAdam."""
    server = optim.adagrad(learning_rate, epsilon=epsilon, initial=initial)
    return fedavg(trainer, server=server, name="fedadagrad")
