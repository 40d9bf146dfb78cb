"""Fed+FT, HFCL and FedDF by hand, against direct computations, and under delay.

One weight, as in test_asynchronous: a client with target a that starts at s ends at ½(a + s).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mixfed.algorithms.asynchronous import ca2fl, fedasync, fedbuff
from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.hybrid import fed_ft, feddf, hfcl
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import Reply, Server, State
from mixfed.core.batches import Batching
from mixfed.core.delays import Scripted
from mixfed.core.optim import sgd
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.data.store import CentralData
from mixfed.errors import InputError
from tests.problems import blobs, central, point, small_mlp, targets, trainer

CLIENTS = targets([[4.0]], [[8.0]])
CENTRE = central([-6.0])
LATE = Schedule(2, delays=Scripted({(0, 1): 1.0}))


def weights(algorithm: object, schedule: Schedule, rounds: int = 2) -> list[float]:
    seen: list[float] = []
    run(
        algorithm,  # type: ignore[arg-type]
        CLIENTS,
        central=CENTRE,
        rounds=rounds,
        schedule=schedule,
        backend=Simulator("loop", threads=1),
        callbacks=[lambda record: seen.append(float(record.params["w"][0]))],
    )
    return seen


def test_fed_ft_fine_tunes_after_every_step() -> None:
    model = point([0.0])
    local, centre = trainer(model, 0.5), trainer(model, 0.5)
    # Round 0: (2 + 4)/2 = 3, then ½(−6 + 3) = −1.5.
    assert weights(fed_ft(fedavg(local), centre), Schedule(2), 1) == [-1.5]
    # Late: round 0: 2 → −2. Round 1: client 0 from −2: Δ = 3; client 1's Δ = 4 with τ = 1: −2 + ½(3 + 4/√2), and on.
    there = -2 + (3 + 4 / 2**0.5) / 2
    seen = weights(fed_ft(fedbuff(local, buffer=0), centre), LATE)
    assert seen == pytest.approx([-2.0, (there - 6) / 2], rel=1e-12)


def test_hfcl_is_fedavg_with_one_more_client() -> None:
    model = point([0.0])
    local, centre = trainer(model, 0.5), trainer(model, 0.5)
    # Δ = 2, 4 and the centre's −3: the mean is 1.
    assert weights(hfcl(fedbuff(local, buffer=0), centre), Schedule(2), 1) == [1.0]
    joined = targets([[4.0]], [[8.0]], [[-6.0]])
    federated = run(fedavg(local), joined, rounds=1, cohort=3, backend=Simulator("loop", threads=1))
    assert float(federated.params["w"][0]) == 1.0
    assert weights(hfcl(fedavg(local), centre, by_examples=True), Schedule(2), 1) == [1.0]
    # Late: round 0: (2 − 3)/2 = −½. Round 1: client 0: ½(4 + ½) = 2.25, client 1: 4/√2, centre: ½(−6 + ½) = −2.75.
    seen = weights(hfcl(fedbuff(local, buffer=0), centre), LATE)
    assert seen == pytest.approx([-0.5, -0.5 + (2.25 + 4 / 2**0.5 - 2.75) / 3], rel=1e-12)


def test_hfcl_trains_at_the_centre_where_no_client_reports() -> None:
    model = point([0.0])
    algorithm = hfcl(fedbuff(trainer(model, 0.5), buffer=0), trainer(model, 0.5))
    assert weights(algorithm, Schedule(2, delays=Scripted({}, otherwise=9.0)), 2) == [-3.0, -4.5]


@pytest.mark.parametrize("domain", ["in", "out"])
def test_feddf_is_distillation_of_the_mean_logits_into_the_mean_model(domain: str) -> None:
    federated, _, test = blobs()
    arrays = {n: x[:12] for n, x in test.arrays.items()}
    if domain == "out":  # other inputs, and labels that the model has no output for
        arrays = {"x": arrays["x"] * 3 + 1, "y": np.arange(12) + 50}
    model = small_mlp()
    local = LocalTrainer(model, sgd(0.3), Batching(0, steps=2))
    batching = Batching(4, epochs=2, shuffle=False)
    backend = Simulator("loop", threads=1)
    result = run(
        feddf(local, batching, learning_rate=0.05),
        federated,
        central=CentralData(arrays),
        rounds=1,
        cohort=3,
        seed=1,
        backend=backend,
    )

    models = []
    from mixfed.core.batches import plan_cohort
    from mixfed.core.schedule import sample_cohort

    chosen = sample_cohort(1, 0, "clients", len(federated), 3)
    plan = plan_cohort("clients", federated, chosen, local.batching, 1, 0)
    for i in range(3):
        models.append(local.train(model.initial(), plan.client(i)).params)
    student = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    student.load_state_dict({n: torch.stack([m[n] for m in models]).mean(0) for n in models[0]})
    adam = torch.optim.Adam(student.parameters(), lr=0.05)
    x = torch.from_numpy(arrays["x"])
    for k in range(6):
        part = x[4 * (k % 3) : 4 * (k % 3) + 4]
        logits = torch.stack([model.outputs(m, {"x": part}, training=False) for m in models]).mean(0)
        loss = F.kl_div(F.log_softmax(student(part), -1), F.softmax(logits, -1), reduction="batchmean")
        adam.param_groups[0]["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * k / 6))
        adam.zero_grad()
        loss.backward()
        adam.step()
    for name, p in student.state_dict().items():
        torch.testing.assert_close(result.params[name], p, rtol=1e-4, atol=1e-5)
    assert result.ledger["server_examples"] == 24
    assert result.ledger["server_flops"] > 0


def test_feddf_under_delay_averages_the_models_that_have_come() -> None:
    """A late model is the client's own, not its change added to the newer model."""
    federated, central_data, _ = blobs(clients=2)
    model = small_mlp()
    local = LocalTrainer(model, sgd(0.3), Batching(0, steps=1))
    still = feddf(local, Batching(4, steps=1), learning_rate=0.0)
    backend = Simulator("loop", threads=1)
    late = Scripted({(0, 0): 1.0, (0, 1): 1.0})
    first = run(still, federated, central=central_data, rounds=2, schedule=Schedule(2, delays=late), backend=backend)
    at_once = run(still, federated, central=central_data, rounds=1, cohort=2, backend=backend)
    for name, x in at_once.params.items():
        torch.testing.assert_close(x, first.params[name])


def test_several_steps_of_a_round_have_server_batches_of_their_own() -> None:
    """Rounds of two steps; the first step of a round has the batches that the only one would have."""
    federated, central_data, _ = blobs()
    model = small_mlp()
    base = fedbuff(LocalTrainer(model, sgd(0.1), Batching(3, steps=1)), buffer=0)
    drawn: list[list[float]] = []

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        drawn.append(server.batches(Batching(5, steps=2)).fields["x"].flatten().tolist())
        return base.step(state, replies, server)

    for buffer in (2, 4):
        schedule = Schedule(4, buffer=buffer)
        run(replace(base, step=step), federated, central=central_data, rounds=2, schedule=schedule)
    (first, second, third, fourth), (one, other) = drawn[:4], drawn[4:]
    assert (first, third) == (one, other)
    assert second not in (first, third)
    assert fourth not in (second, third)


def test_two_models_are_refused() -> None:
    with pytest.raises(InputError, match="one model"):
        fed_ft(fedavg(trainer(point([0.0]), 0.5)), trainer(point([0.0]), 0.5))


@pytest.mark.parametrize("make", [ca2fl, fedasync])
def test_hfcl_is_built_on_methods_that_sum(make: Any) -> None:
    model = point([0.0])
    with pytest.raises(InputError, match="build it on fedbuff or fedavg"):
        hfcl(make(trainer(model, 0.5)), trainer(model, 0.5))


@pytest.mark.parametrize("other_domain", [False, True])
def test_feddf_warns_of_classes_that_only_the_server_has(other_domain: bool) -> None:
    """Clients have 0 and 1, the centre has 2. Labels of another domain say nothing about the task's."""
    federated, server_data, _ = blobs()
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(3, steps=1))
    algorithm = feddf(local, Batching(8, steps=1), other_domain=other_domain)
    warned = run(algorithm, federated, central=server_data, rounds=1, cohort=4).warnings
    assert any("the label 2" in w and "cannot learn" in w for w in warned) is not other_domain
