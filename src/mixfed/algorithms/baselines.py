"""The ends of the scale: the centre alone, every client alone, and one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mixfed.algorithms.fedavg import fedavg
from mixfed.core import algorithm as core
from mixfed.core import tree
from mixfed.core.algorithm import (
    CLIENTS,
    Algorithm,
    AtCentre,
    Lateness,
    Message,
    OwnParts,
    Private,
    Reply,
    Server,
    State,
    Upload,
)
from mixfed.core.batches import Batches
from mixfed.core.optim import Optimizer
from mixfed.core.train import LocalTrainer
from mixfed.ranges import CountOrNone, within_ranges


def center(trainer: LocalTrainer) -> Algorithm:
    """Center: the server trains on its own data and asks no client; K_c steps a round.

    The optimizer's memory starts anew every round, as it does on clients.
    """
    model = trainer.model

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        return {"params": core.as_server_copy(server.train(trainer, state["params"]).params, state["params"])}

    return Algorithm(
        "center",
        model,
        init=lambda params: {"params": params},
        broadcast=lambda state, server: ({}, state),
        step=step,
        batching={},
        centre=AtCentre.of(trainer),
    )


def local(trainer: LocalTrainer) -> Algorithm:
    """Local only: every client trains a model of its own from the common start; nothing is ever sent.

    There is no common model to learn, so ``params`` stays at the start; clients' models are evaluated one by one.
    """
    model = trainer.model

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        end = trainer.train(private["params"], batches, message.round).params
        return Upload({}, batches.examples), {"params": core.own_model(model, private["params"], end)}

    return Algorithm(
        "local",
        model,
        init=lambda params: {"params": params},
        broadcast=lambda state, server: ({CLIENTS: Message({}, server.round)}, state),
        step=lambda state, replies, server: state,
        client=client,
        batching={CLIENTS: trainer.batching},
        lateness=Lateness(same_in_every_round=trainer.same_in_every_round),
        own=OwnParts(lambda params: {"params": tree.cast(params, model.dtype)}, lambda params, own: own["params"]),
    )


@within_ranges()
def transfer(
    trainer: LocalTrainer, centre: LocalTrainer, *, central_rounds: CountOrNone, server: Optimizer | None = None
) -> Algorithm:
    """Transfer learning: ``central_rounds`` rounds at the centre, then FedAvg on the clients.

    The negative baseline of mixed learning: the second half forgets what only the first half saw.
    """
    first, then = center(centre), fedavg(trainer, server=server)

    def at_centre(server: Server) -> bool:
        return server.round < central_rounds

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        if not at_centre(server):
            return then.step(state, replies, server)
        return state | first.step({"params": state["params"]}, replies, server)

    return replace(
        then,
        name="transfer",
        broadcast=lambda state, server: ({}, state) if at_centre(server) else then.broadcast(state, server),
        step=step,
        centre=first.centre,
    )
