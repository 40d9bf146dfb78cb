"""Rounds of mixed learning derived by hand.

The common problem: w starts at 0; client A holds the target 2 and client B the target 4, so that their gradients are
w − 2 and w − 4; the centre holds the target −1 with curvature 2, so that its gradient is 2(w + 1). Everyone takes
K = 2 full-batch steps of rate 0.1, and both clients weigh the same.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mixfed.algorithms.mixed import Centre, Population, example_transfer, gradient_1way, gradient_2way, parallel
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import optim
from mixfed.core.algorithm import Algorithm
from mixfed.core.loop import Result
from tests.problems import central, point, targets, trainer

CLIENTS = targets([[2.0]], [[4.0]])
CENTRE = central([-1.0], curvature=2.0)
EXECUTORS = ("loop", "vmap")


def train(algorithm: Algorithm, rounds: int, executor: str = "loop", **options: object) -> Result:
    return run(algorithm, CLIENTS, central=CENTRE, rounds=rounds, cohort=2, backend=Simulator(executor), **options)


def w(result: Result) -> float:
    return float(result.params["w"][0])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_parallel_training(executor: str) -> None:
    # A: 0 → 0.2 → 0.2 + 0.1·1.8 = 0.38.  B: 0 → 0.4 → 0.4 + 0.1·3.6 = 0.76.  Δ_f = (0.38 + 0.76)/2 = 0.57.
    # Centre: 0 → −0.2 → −0.2 − 0.1·2·0.8 = −0.36 = Δ_c.  Sum: 0.21.
    model = point([0.0])
    clients, centre = trainer(model, 0.1, 2), trainer(model, 0.1, 2)
    assert w(train(parallel(clients, centre), 1, executor)) == pytest.approx(0.21, abs=1e-12)
    # The convex merge of 2021 with α = 0.25: 0.25·(−0.36) + 0.75·0.57 = 0.3375.
    assert w(train(parallel(clients, centre, alpha=0.25), 1, executor)) == pytest.approx(0.3375, abs=1e-12)
    # A merge rate of 0.5 halves the step; a server rate of 2 doubles Δ_f: 0.5·(1.14 − 0.36) = 0.39.
    doubled = Population(clients, server=optim.sgd(2.0))
    merged = parallel(doubled, centre, merge=optim.sgd(0.5))
    assert w(train(merged, 1, executor)) == pytest.approx(0.39, abs=1e-12)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_loss_weights_are_inside_the_losses(executor: str) -> None:
    # w_f = 0.5: A's gradient is 0.5(w − 2): 0 → 0.1 → 0.1 + 0.05·1.9 = 0.195.  B: 0.2 → 0.2 + 0.05·3.8 = 0.39.
    # w_c = 0.25: gradient 0.5(w + 1): 0 → −0.05 → −0.05 − 0.05·0.95 = −0.0975.  Sum: 0.2925 − 0.0975 = 0.195.
    model = point([0.0])
    half = Population(trainer(model, 0.1, 2), weight=0.5)
    quarter = Centre(trainer(model, 0.1, 2), weight=0.25)
    assert w(train(parallel(half, quarter), 1, executor)) == pytest.approx(0.195, abs=1e-12)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_one_way_gradient_transfer(executor: str) -> None:
    # g̃_c = 2(0 + 1) = 2.  A: w − 2 + 2 = w = 0, stays at 0.  B: 0 + 0.1·2 = 0.2 → 0.2 + 0.1·1.8 = 0.38.  Mean: 0.19.
    model = point([0.0])
    algorithm = gradient_1way(trainer(model, 0.1, 2), trainer(model, 0.1, 2))
    assert w(train(algorithm, 1, executor)) == pytest.approx(0.19, abs=1e-12)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_way_gradient_transfer(executor: str) -> None:
    # Round 1 has no gradients to share yet: as parallel training, w = 0.21.
    # Then g̃_c = 0.36/(0.1·2) = 1.8 (the mean of 2 and 1.6) and g̃_f = −0.57/(0.1·2) = −2.85.
    # Round 2. A: gradient w − 0.2: 0.21 → 0.209 → 0.2081.  B: gradient w − 2.2: 0.21 → 0.409 → 0.5881.
    # Δ_f = (−0.0019 + 0.3781)/2 = 0.1881.  Centre: gradient 2w − 0.85: 0.21 → 0.253 → 0.2874, Δ_c = 0.0774.
    # w = 0.21 + 0.1881 + 0.0774 = 0.4755.
    model = point([0.0])
    algorithm = gradient_2way(trainer(model, 0.1, 2), trainer(model, 0.1, 2))
    first, second = train(algorithm, 1, executor), train(algorithm, 2, executor)
    assert w(first) == pytest.approx(0.21, abs=1e-12)
    gradients = {source: float(g["w"][0]) for source, g in first.state["gradients"].items()}
    assert gradients == pytest.approx({"clients": -2.85, "centre": 1.8}, abs=1e-12)
    assert w(second) == pytest.approx(0.4755, abs=1e-12)
    # g̃_c = −0.0774/0.2 + 2.85 = 2.463, the mean of 2.42 and 2.506; g̃_f = −0.1881/0.2 − 1.8 = −2.7405.
    gradients = {source: float(g["w"][0]) for source, g in second.state["gradients"].items()}
    assert gradients == pytest.approx({"clients": -2.7405, "centre": 2.463}, abs=1e-12)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_two_way_transfer_with_momentum_uploads_the_raw_gradients(executor: str) -> None:
    # Momentum 0.5.  A: g = −2, w = 0.2; g = −1.8, m = −2.8, w = 0.48.  B: −4, 0.4; −3.6, m = −5.6, w = 0.96.
    # Δ_f = 0.72, but the mean raw gradient is −(2 + 1.8 + 4 + 3.6)/4 = −2.85, which Δ_f/(ηK) = 3.6 would not give.
    model = point([0.0])
    clients = trainer(model, 0.1, 2, optimizer=optim.sgd(0.1, momentum=0.5))
    result = train(gradient_2way(clients, trainer(model, 0.1, 2)), 1, executor)
    assert w(result) == pytest.approx(0.72 - 0.36, abs=1e-12)
    assert float(result.state["gradients"]["clients"]["w"][0]) == pytest.approx(-2.85, abs=1e-12)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("ratio", [0.5, None])
def test_example_transfer(executor: str, ratio: float | None) -> None:
    # A ratio of ½, which is the default, sends each client as many central examples as it has: one, the target −1
    # (curvature as the clients').
    # One full-batch step: A's gradient is w − (2 − 1)/2 = −0.5, B's w − (4 − 1)/2 = −1.5.  Mean Δ = 0.1·1 = 0.1.
    model = point([0.0])
    algorithm = example_transfer(trainer(model, 0.1, 1), ratio=ratio)
    plain = central([-1.0])
    plain = replace(plain, arrays={"x": plain.arrays["x"]})
    result = run(algorithm, CLIENTS, central=plain, rounds=1, cohort=2, backend=Simulator(executor))
    assert w(result) == pytest.approx(0.1, abs=1e-12)


def test_ledger_counts_what_each_method_sends() -> None:
    """The model is one float64, 8 bytes; two clients a round."""
    model = point([0.0])
    clients, centre = trainer(model, 0.1, 2), trainer(model, 0.1, 2)

    def sent(algorithm: Algorithm) -> tuple[int, int]:
        ledger = train(algorithm, 1).ledger
        return ledger["bytes_down"], ledger["bytes_up"]

    assert sent(parallel(clients, centre)) == (2 * 8, 2 * 8)
    assert sent(gradient_1way(clients, centre)) == (2 * (8 + 8), 2 * 8)
    step_count = 4  # one float32 that says how many steps were taken
    assert sent(gradient_2way(clients, centre)) == (2 * (8 + 8), 2 * (8 + step_count))
    momentum = trainer(model, 0.1, 2, optimizer=optim.sgd(0.1, momentum=0.5))
    assert sent(gradient_2way(momentum, centre)) == (2 * (8 + 8), 2 * (8 + 8 + step_count))
    examples = replace(CENTRE, arrays={"x": CENTRE.arrays["x"]})  # each of one float64
    result = run(example_transfer(clients, count=1), CLIENTS, central=examples, rounds=1, cohort=2)
    assert (result.ledger["bytes_down"], result.ledger["bytes_up"]) == (2 * (8 + 8), 2 * 8)
    assert train(parallel(clients, centre), 1).ledger["server_examples"] == 2
    assert train(gradient_1way(clients, centre), 1).ledger["server_examples"] == 1
