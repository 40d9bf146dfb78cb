"""How unlike are the clients' and the centre's gradients? The sampled (G, B) dissimilarity of Augenstein et al., 2022.

With weighted losses f_f and f_c, f = f_f + f_c, and gradients ∇̃ sampled on a cohort and on a central batch::

    G̃² = ‖∇̃f_f‖²/w_f + ‖∇̃f_c‖²/w_c − ‖∇̃f‖²          (for w_f = w_c = ½ this is ‖∇̃f_f − ∇̃f_c‖²)
    B̃² = (‖∇̃f_f‖²/w_f + ‖∇̃f_c‖²/w_c) / ‖∇̃f‖²

with ∇̃f_f = Σ gᵢ/S, the plain mean over the cohort (Eq. 7), along a training run with one local step a round (K = 1), in
which all mixed methods are the same. Beside them: σ², the variance of a client's batch gradient around the cohort's
mean (by S − 1), and σ_c², that of a central batch (0 where the centre minimises a regulariser, which needs none).
All of it needs sums over clients only, so it can be measured in a real federation too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.algorithms.makers import Setup
from mixfed.algorithms.mixed import Centre
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import algorithm as core
from mixfed.core import tree
from mixfed.core.algorithm import CENTRE, CLIENTS, Algorithm, Message, OwnParts, Private, Reply, Server, State, Upload
from mixfed.core.batches import Batches, Batching, plan_central, plan_cohort
from mixfed.core.model import Loss
from mixfed.core.optim import sgd
from mixfed.core.schedule import sample_cohort
from mixfed.core.train import LocalTrainer, gradient_of, weighted
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError

QUANTITIES = ("G2", "B2", "sigma2", "sigma_c2", "gradient2", "loss")


@dataclass(frozen=True)
class Dissimilarity:
    """What was measured: an array [repeats, rounds] for each of ``QUANTITIES``, and the largest estimate of β.

    ``central_batch`` is 0 where the centre minimises a regulariser alone.
    """

    measured: dict[str, NDArray[np.float64]]
    smoothness: float
    first_round: int
    client_batch: int
    central_batch: int

    def largest(self, quantity: str) -> float:
        """The maximum over rounds (from ``first_round`` on) and over repeats, as the paper reports it."""
        return float(self.measured[quantity][:, self.first_round :].max())

    def typical(self, quantity: str) -> float:
        """The median over rounds (from ``first_round`` on) and repeats."""
        return float(np.median(self.measured[quantity][:, self.first_round :]))


def measure_dissimilarity(
    setup: Setup,
    clients: FederatedData,
    central: CentralData | None,
    *,
    cohort: int,
    rounds: int = 100,
    first_round: int = 10,
    repeats: int = 5,
    seed: int = 0,
    executor: str = "auto",
    progress: Callable[[], None] = lambda: None,
) -> Dissimilarity:
    """Trains with K = 1 for some rounds, a number of times, and measures the gradients on the way."""
    if not 0 <= first_round < rounds:
        raise InputError(f"The probe looks at rounds from {first_round} on, so it needs more rounds than {rounds}.")
    if repeats < 1:
        raise InputError("The probe needs at least one repeat.")
    algorithm = _one_step(setup)
    runs, smoothness = [], 0.0
    for repeat in range(repeats):
        result = run(
            algorithm,
            clients,
            central=central,
            rounds=rounds,
            cohort=cohort,
            seed=seed + repeat,
            backend=Simulator(executor),
            callbacks=[lambda record: progress()],
        )
        runs.append(result.state["measured"].numpy())
        for params in (algorithm.model.initial(), result.params):
            smoothness = max(smoothness, _smoothness(setup, params, clients, central, cohort, seed + repeat))
    stacked = np.stack(runs)
    batches = [min(c.trainer.batching.batch_size or len(d), len(d)) for c, d in _with_data(setup, central)]
    return Dissimilarity(
        {name: stacked[:, :, i] for i, name in enumerate(QUANTITIES)},
        smoothness,
        first_round,
        setup.client.batching.batch_size,
        batches[0] if batches else 0,
    )


def _one_step(setup: Setup) -> Algorithm:
    """SGD on the mixed loss, one gradient a round from each side, which writes down what it sees."""
    (w_f, w_c), model, rate = setup.weights, setup.client.model, setup.client.optimizer.learning_rate
    if min(w_f, w_c) <= 0:
        raise InputError("The probe compares two losses; the weights of both must be above 0.")
    adding = sgd(0.0, momentum=0.5)  # which stays where it is, and adds gradients up as they are, in factors or not
    clients = LocalTrainer(model, adding, replace(setup.client.batching, steps=1, epochs=None), loss=setup.client.loss)

    def central(params: Params, server: Server) -> list[tuple[Params, Tensor]]:
        """∇̃f_c and f_c on each of two batches, added up over what the centre minimises."""
        found = []
        for centre in setup.central_sources():
            batching = replace(centre.trainer.batching, steps=2, epochs=None)
            two = _one_by_one(server.batches(batching, centre.name if centre.needs_data else None))
            found.append([_gradient(_weighted(centre.trainer, centre.weight), setup, params, b) for b in two])
        return [
            (tree.combine([g for g, _ in parts], [1.0] * len(parts)), torch.stack([v for _, v in parts]).sum())
            for parts in zip(*found, strict=True)
        ]

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        params = core.received(message["params"], private)
        seen = clients.train(params, batches, message.round, want_gradient=True)
        gradient = tree.scale(seen.gradient_sum or {}, w_f)
        sums = {"square": tree.squared(gradient), "loss": w_f * seen.loss}
        return Upload({"gradient": gradient, "sums": sums}, torch.ones_like(batches.examples)), private

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        params = state["params"]
        seen, sums = core.mean(replies, "gradient"), core.mean(replies, "sums")
        (first, loss), (second, _) = central(params, server)
        both = tree.add(seen, first)
        norms = [float(tree.dot(g, g)) for g in (seen, first, both)]
        count = sum(r.weight for r in replies)
        parts = norms[0] / w_f + norms[1] / w_c
        apart = tree.sub(first, second)
        row = [
            parts - norms[2],
            parts / max(norms[2], 1e-30),
            (float(sums["square"]) - norms[0]) * count / max(count - 1, 1),
            0.5 * float(tree.dot(apart, apart)),
            norms[2],
            float(sums["loss"]) + float(loss),
        ]
        measured = torch.cat([state["measured"], torch.tensor([row], dtype=torch.float64)])
        return {"params": tree.add(params, both, -rate), "measured": measured}

    return Algorithm(
        "probe",
        model,
        init=lambda params: {"params": params, "measured": torch.zeros(0, len(QUANTITIES), dtype=torch.float64)},
        broadcast=lambda state, server: (
            {CLIENTS: Message({"params": core.sent_down(model, state["params"])}, server.round)},
            state,
        ),
        step=step,
        client=client,
        batching={CLIENTS: clients.batching},
        own=OwnParts(lambda params: core.kept_private(model, params)),
    )


def _weighted(trainer: LocalTrainer, weight: float) -> Loss:
    return weighted(trainer.loss or trainer.model.loss, weight)


def _with_data(setup: Setup, central: CentralData | None) -> list[tuple[Centre, CentralData]]:
    """What the centre minimises on data."""
    return [(c, central) for c in setup.central_sources() if c.needs_data and central is not None]


def _gradient(loss: Loss, setup: Setup, params: Params, batches: Batches) -> tuple[Params, Tensor]:
    model = setup.client.model
    params = tree.cast(params, model.dtype)
    batch, _ = next(iter(batches))
    buffers = tree.clone({n: params[n] for n in model.buffers})
    gradient, value, _ = gradient_of(loss, model.trained(params), buffers, batch, batches.vectorised)
    return gradient, value


def _one_by_one(batches: Batches) -> list[Batches]:
    return [
        replace(batches, fields={n: x[k : k + 1] for n, x in batches.fields.items()}, counts=batches.counts[k : k + 1])
        for k in range(batches.length)
    ]


def _smoothness(
    setup: Setup, params: Params, clients: FederatedData, central: CentralData | None, cohort: int, seed: int
) -> float:
    """An estimate of β from below: the largest curvature of the mixed loss that a few power iterations find.

    Curvature along v is taken as (∇f(x + εv) − ∇f(x − εv))/2ε on one cohort's and one central batch.
    """
    model = setup.client.model
    chosen = sample_cohort(seed, 0, CLIENTS, len(clients), cohort)
    once = replace(setup.client.batching, steps=1, epochs=None)
    plan = plan_cohort(CLIENTS, clients, chosen, once, seed, 0)
    pooled = _pooled([plan.client(i, model.device) for i in range(len(plan))])
    terms: list[tuple[Loss, Batch]] = [(_weighted(setup.client, setup.weights[0]), pooled)]
    for centre, data in _with_data(setup, central):
        at_centre = plan_central(CENTRE, data, Batching(centre.trainer.batching.batch_size, steps=1), seed, 0)
        batch = next(iter(at_centre.client(0, model.device)))[0]
        terms.append((_weighted(centre.trainer, centre.weight), batch))
    terms += [(_weighted(c.trainer, c.weight), {}) for c in setup.central_sources() if not c.needs_data]
    point = tree.cast(params, torch.promote_types(model.dtype, torch.float32))

    def gradient(at: Params) -> Params:
        found = [
            gradient_of(loss, model.trained(at), tree.clone({n: at[n] for n in model.buffers}), batch)[0]
            for loss, batch in terms
        ]
        return tree.combine(found, [1.0] * len(found))

    draw = torch.Generator().manual_seed(seed)
    direction = {n: torch.randn(x.shape, generator=draw).to(x) for n, x in model.trained(point).items()}
    curvature = 0.0
    for _ in range(12):
        length = float(tree.norm(direction))
        if length == 0:
            break
        step = 1e-2 / length
        ahead, behind = (gradient(tree.add(point, direction, s)) for s in (step, -step))
        direction = tree.scale(tree.sub(ahead, behind), 0.5 / 1e-2)
        curvature = float(tree.norm(direction))
    return curvature


def _pooled(cohort: Sequence[Batches]) -> Batch:
    batches = [next(iter(b))[0] for b in cohort]
    together = {n: torch.cat([b[n] for b in batches]) for n in batches[0] if n != "key"}
    return together | {"key": batches[0]["key"]}
