"""Methods that use data at the server beside a federated one: Fed+FT, HFCL and FedDF."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mixfed.algorithms.asynchronous import sending_models, taking_late
from mixfed.algorithms.fedavg import fedavg
from mixfed.core import algorithm as core
from mixfed.core import optim, tree
from mixfed.core.algorithm import CENTRE, Algorithm, AtCentre, Reply, Server, State
from mixfed.core.batches import Batches, Batching
from mixfed.core.model import Loss, Model, masked_mean
from mixfed.core.optim import Optimizer
from mixfed.core.train import LocalTrainer, gradient_of
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.errors import InputError, explained
from mixfed.ranges import NotNegative, Positive, within_ranges


def fed_ft(base: Algorithm, centre: LocalTrainer) -> Algorithm:
    """Fed+FT: after every step of the federated method, the model is fine-tuned on the server's data."""
    _same_model(base, centre)

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        state = base.step(state, replies, server)
        params = base.params(state)
        return base.with_params(state, core.as_server_copy(server.train(centre, params).params, params))

    rows = replace(base.rows, untouched_stay=False)
    return replace(base, name="fed_ft", step=step, rows=rows, centre=AtCentre.of(centre))


def hfcl(base: Algorithm, centre: LocalTrainer, *, by_examples: bool = False) -> Algorithm:
    """HFCL (Elbir et al., 2022): the server's data is one more client, which is asked in every round and never late.

    Its update counts as one client's (as FedBuff weighs clients), or with ``by_examples`` by the examples it processed
    (as FedAvg does). Where clients keep part of the model to themselves, so does the server.
    """
    _same_model(base, centre)
    if base.uploads == "each":
        raise InputError(
            f"HFCL adds the server's update to the sum of the clients', and {base.name} wants to know whose each is;"
            " build it on fedbuff or fedavg."
        )

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        params = base.params(state)
        end = core.as_server_copy(server.train(centre, params).params, params)
        weight = float(server.batches(centre.batching).examples) if by_examples else 1.0
        own = Reply({"delta": core.change(base.model, params, end)}, weight, (), CENTRE)
        after = base.step(state, [*replies, own], server)
        shared = replies[0].values["delta"] if replies else own.values["delta"]
        kept = {n: end[n] for n in own.values["delta"] if n not in shared}
        return base.with_params(after, base.params(after) | kept)

    return replace(
        base,
        name="hfcl",
        step=step,
        lateness=replace(base.lateness, buffer=0, steps_alone=True),
        rows=replace(base.rows, untouched_stay=False),
        centre=AtCentre.of(centre),
    )


@within_ranges()
def feddf(
    trainer: LocalTrainer,
    batching: Batching,
    *,
    learning_rate: NotNegative = 1e-3,
    temperature: Positive = 1.0,
    other_domain: bool = False,
) -> Algorithm:
    """FedDF (Lin et al., 2020): the mean of the clients' models learns to answer as their ensemble does.

    x ← Σ xᵢ/n, then Adam steps on KL(softmax(Σ zᵢ/n) ‖ softmax(z)) over the server's examples, zᵢ the logits of client
    i's model; the rate falls along a cosine from ``learning_rate`` to 0 and starts anew every round. Labels are never
    looked at, so the server's data may be of another domain. Unless it is, a run warns of classes that only the server
    has: nobody teaches them.
    """
    model, optimizer = trainer.model, optim.adam(learning_rate)

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        params = state["params"]
        teachers = [params | core.as_server_copy(r.values["model"], params) for r in replies]
        student = tree.combine(teachers, [1.0 / len(teachers)] * len(teachers))

        def distilled(batches: Batches) -> Params:
            return distil(model, optimizer, student, teachers, batches, temperature)

        with explained("The clients' models cannot be distilled"):
            return state | {"params": server.work(("feddf", len(teachers)), distilled, server.batches(batching))}

    late = taking_late(sending_models(fedavg(trainer, name="feddf")), step)
    return replace(late, centre=AtCentre(guides=() if other_domain else (CENTRE,)))


def distil(
    model: Model,
    optimizer: Optimizer,
    student: Params,
    teachers: Sequence[Params],
    batches: Batches,
    temperature: float = 1.0,
) -> Params:
    """Trains the student towards the mean of the teachers' logits, the rate falling along a cosine."""
    start = tree.cast(student, model.dtype)
    teachers = [tree.cast(t, model.dtype) for t in teachers]
    weights, memory = model.trained(start), optimizer.init(model.trained(start))
    buffers = tree.clone({n: start[n] for n in model.buffers})
    for k, (batch, _) in enumerate(batches):
        logits = torch.stack([model.outputs(t, batch, training=False) for t in teachers]).mean(0)
        gradient, _, buffers = gradient_of(_answers_as(model, logits, temperature), weights, buffers, batch)
        direction, memory = optimizer.direction(gradient, memory, weights)
        rate = optimizer.learning_rate * 0.5 * (1 + math.cos(math.pi * k / batches.length))
        weights = tree.add(weights, direction, -rate)
    return core.as_server_copy(start | weights | buffers, student)


def _answers_as(model: Model, logits: Tensor, temperature: float) -> Loss:
    target = F.softmax(logits / temperature, dim=-1)

    def loss(params: Params, batch: Batch) -> Tensor:
        answer = F.log_softmax(model.outputs(params, batch, training=True) / temperature, dim=-1)
        apart = F.kl_div(answer, target, reduction="none").flatten(1).sum(1)
        return masked_mean(apart, batch.get("mask"))

    return loss


def _same_model(base: Algorithm, centre: LocalTrainer) -> None:
    if base.model is not centre.model:
        raise InputError("Clients and centre train one model; build their trainers from the same Model.")
