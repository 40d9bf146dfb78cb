"""The probe: dissimilarity derived by hand, smoothness of a quadratic, and advice that follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mixfed.algorithms.makers import Setup
from mixfed.backends.simulator.factored import InFactors
from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.train import LocalTrainer
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.evaluate.probe.advice import advise, as_json
from mixfed.evaluate.probe.dissimilarity import Dissimilarity, measure_dissimilarity
from mixfed.experiments.probing import is_linear, local_steps
from mixfed.experiments.recipe import Training
from mixfed.models.networks import linear, mlp
from tests.problems import point, trainer


def quadratics() -> tuple[FederatedData, CentralData]:
    """Clients pull w to 1 and 3 (curvature 1), the centre to −2 (curvature 4)."""
    x = np.array([[1.0], [3.0]])
    clients = FederatedData.from_arrays({"x": x, "c": np.ones_like(x)}, np.arange(2))
    return clients, CentralData({"x": np.array([[-2.0]]), "c": np.array([[4.0]])})


def measured(weights: tuple[float, float], rounds: int = 3, **options: object) -> Dissimilarity:
    model = point([0.0])
    setup = Setup(trainer(model, 0.1, 5), sgd(1.0), 10, trainer(model, 0.1, 5), weights=weights)
    clients, centre = quadratics()
    return measure_dissimilarity(setup, clients, centre, cohort=2, rounds=rounds, repeats=2, first_round=0, **options)


def test_dissimilarity_by_hand() -> None:
    # At w = 0 with weights ½: client gradients ½(0 − 1) and ½(0 − 3), mean a = −1; centre b = ½·4·2 = 4; a + b = 3.
    # G̃² = (1 + 16)/½ − 9 = 25 = (a − b)².  B̃² = 34/9.  σ² = 2·(mean of (½², (3/2)²) − 1) = ½.  σ_c² = 0.
    # Loss: ½·(½·1 + ½·9)/2 + ½·(½·4·4) = 1.25 + 4.  One step of rate 0.1 on the sum: w = −0.3.
    # There: a = ½(−0.3 − 2) = −1.15, b = 2(−0.3 + 2) = 3.4; G̃² = 4.55² = 20.7025.
    found = measured((0.5, 0.5))
    first = {name: values[0, 0] for name, values in found.measured.items()}
    expected = {"G2": 25.0, "B2": 34 / 9, "sigma2": 0.5, "sigma_c2": 0.0, "gradient2": 9.0, "loss": 5.25}
    assert first == pytest.approx(expected, abs=1e-9)
    assert found.measured["G2"][0, 1] == pytest.approx(20.7025, abs=1e-9)
    assert found.largest("G2") == pytest.approx(25.0)
    # The curvature of ½·1 + ½·4 is 2.5.
    assert found.smoothness == pytest.approx(2.5, rel=1e-6)


@pytest.mark.parametrize("executor", ["vmap", "factored"])
def test_clients_in_factors_are_measured_as_clients_one_by_one(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network wide enough for factors: 40·30 weights, batches of 4."""
    met, train = [], InFactors.train

    def counted(*given: Any, **options: Any) -> Any:
        met.append(train(*given, **options))
        return met[-1]

    monkeypatch.setattr(InFactors, "train", counted)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 40)).astype(np.float32), draw.integers(0, 3, 60)
    clients = FederatedData.from_arrays({"x": x, "y": y}, np.arange(60) // 6)
    torch.manual_seed(0)
    model = Model(mlp(40, 3, [30]), cross_entropy)
    local = LocalTrainer(model, sgd(0.1), Batching(4, steps=1))
    setup = Setup(local, sgd(1.0), 10, local, weights=(0.6, 0.4))
    centre = CentralData({"x": x[:20], "y": y[:20]})
    loop, other = (
        measure_dissimilarity(setup, clients, centre, cohort=8, rounds=3, repeats=1, first_round=0, executor=how)
        for how in ("loop", executor)
    )
    for name, values in loop.measured.items():
        np.testing.assert_allclose(other.measured[name], values, rtol=2e-4, atol=1e-6, err_msg=name)
    assert any(found is not None for found in met) == (executor == "factored")


@pytest.mark.parametrize("with_data", [False, True])
def test_a_regulariser_is_probed_as_the_data_that_it_equals(with_data: bool) -> None:
    """2·(w + 2)² is the loss of the centre's one example; with data as well the centre counts twice."""
    model = point([0.0])
    alone = replace(trainer(model, 0.1, 5), loss=lambda p, batch: 2 * (p["w"] + 2).square().sum())
    clients, centre = quadratics()
    data = trainer(model, 0.1, 5) if with_data else None
    setup = Setup(trainer(model, 0.1, 5), sgd(1.0), 10, data, regulariser=alone, weights=(0.5, 0.5))
    found = measure_dissimilarity(
        setup, clients, centre if with_data else None, cohort=2, rounds=2, repeats=1, first_round=0
    )
    # As in the test above with b = 4, or 8 with both: then a + b = 7, G̃² = (1 + 64)/½ − 49 = 81, curvature ½ + 2 + 2.
    assert found.measured["G2"][0, 0] == pytest.approx(81.0 if with_data else 25.0, abs=1e-9)
    assert found.measured["loss"][0, 0] == pytest.approx(9.25 if with_data else 5.25, abs=1e-9)
    assert found.smoothness == pytest.approx(4.5 if with_data else 2.5, rel=1e-6)
    assert (found.measured["sigma_c2"] == 0).all()
    assert found.central_batch == (1 if with_data else 0)
    if not with_data:
        advice = advise(found, cohort=2, steps=5, server_rate=1.0, central_examples=0)
        assert advice.algorithm == "gradient_1way"  # G̃² of 25 is large, and no central batch is too small
        assert "needs no data" in " ".join(advice.reasons)


def test_dissimilarity_with_unequal_weights() -> None:
    # w_f = ¾, w_c = ¼: a = −1.5, b = 2.  G̃² = 2.25/0.75 + 4/0.25 − 0.25 = 18.75.  B̃² = 19/0.25 = 76.
    found = measured((0.75, 0.25))
    assert found.measured["G2"][0, 0] == pytest.approx(18.75, abs=1e-9)
    assert found.measured["B2"][0, 0] == pytest.approx(76.0, abs=1e-9)


def test_central_variance_is_that_of_one_batch() -> None:
    """Central targets ±1 with batches of one: the gradient is w ± 1, of variance 1 (σ_c² of the weighted loss: ¼)."""
    model = point([0.0])
    setup = Setup(trainer(model, 0.01), sgd(1.0), 10, trainer(model, 0.01, batch=1), weights=(0.5, 0.5))
    clients = FederatedData.from_arrays({"x": np.zeros((2, 1))}, np.arange(2))
    centre = CentralData({"x": np.repeat([[1.0], [-1.0]], 50, axis=0)})
    found = measure_dissimilarity(setup, clients, centre, cohort=2, rounds=200, repeats=2, first_round=0)
    assert float(found.measured["sigma_c2"].mean()) == pytest.approx(0.25, rel=0.2)


def found_with(g2: float, sigma_c2: float = 0.01) -> Dissimilarity:
    def full(value: float) -> np.ndarray:
        return np.full((1, 5), value)

    quantities = {"G2": full(g2), "B2": full(1.5), "sigma2": full(1.0), "sigma_c2": full(sigma_c2)}
    quantities |= {"gradient2": full(1.0), "loss": full(2.0)}
    return Dissimilarity(quantities, smoothness=2.0, first_round=1, client_batch=5, central_batch=100)


def test_advice() -> None:
    alike = advise(found_with(0.03), cohort=10, steps=4, server_rate=1.0, central_examples=5000)
    unlike = advise(found_with(49.0), cohort=10, steps=4, server_rate=1.0, central_examples=5000)
    few = advise(found_with(49.0), cohort=10, steps=4, server_rate=1.0, central_examples=30)
    assert [a.algorithm for a in (alike, unlike, few)] == ["parallel", "gradient_1way", "gradient_2way"]
    # Per-example central variance 0.01·100 = 1; S·1/|B_c| = σ² = 1 at |B_c| = 10, K times that for 1-way.
    assert unlike.central_batch == {"parallel": 10, "gradient_1way": 40, "gradient_2way": 10}
    # Table 4 with B² = 1: 1/(12·2·4), 1/(18·2·4), 1/(24·2·4).
    assert unlike.largest_rate == pytest.approx(
        {"parallel": 1 / 96, "gradient_1way": 1 / 144, "gradient_2way": 1 / 192}
    )
    # Table 4, convex: 1/(12·2·4), 1/(8·2·4), 1/(81·2·4).
    convex = advise(found_with(49.0), cohort=10, steps=4, server_rate=1.0, central_examples=5000, convex=True)
    assert convex.largest_rate == pytest.approx({"parallel": 1 / 96, "gradient_1way": 1 / 64, "gradient_2way": 1 / 648})
    assert "Table 4 (convex)" in " ".join(convex.reasons)
    assert unlike.slowdown > alike.slowdown > 1
    assert "estimate" in " ".join(unlike.reasons)
    assert as_json(found_with(49.0), unlike)["advice"]["algorithm"] == "gradient_1way"


def test_bounds_by_hand() -> None:
    """F = 2, β = 2, σ² = 1, σ_c² = 0.01, S = 10, K = 4, so that σ² + S·σ_c² = 1.1 and K·S = 40.

    Non-convex: ε = 0.01·‖∇f‖² = 0.01; 2-way 1.1·4/(40·1e-4) + 4/0.01 = 1,500, parallel √(2·2)/1e-3 = 2,000 more, 1-way
    1.4·4/(40·1e-4) + 400 = 1,800. Convex: ε = 0.01·F = 0.02 and D² = 2F/β = 2; 2-way 1.1·2/(40·4e-4) + 4/0.02 = 337.5,
    parallel √(2·2)/0.02^1.5 = 707.1 more, 1-way 1.4·2/(40·4e-4) + 200 = 375.
    """
    plain, convex = (
        advise(found_with(2.0), cohort=10, steps=4, server_rate=1.0, central_examples=5000, convex=c)
        for c in (False, True)
    )
    assert (plain.slowdown, plain.noise) == pytest.approx((3500 / 1500, 1800 / 1500))
    assert (convex.slowdown, convex.noise) == pytest.approx((1 + 2 / 0.02**1.5 / 337.5, 375 / 337.5))


def test_which_transfer_bears_the_larger_rate_depends_on_the_steps() -> None:
    one, many = (
        " ".join(advise(found_with(49.0), cohort=10, steps=k, server_rate=1.0, central_examples=5000).reasons)
        for k in (1, 5)
    )
    assert "bears larger rates than 2-way" in one
    assert "first to diverge" in many


def test_a_convex_problem_is_a_linear_network() -> None:
    assert is_linear(linear(4, 2))
    assert is_linear(torch.nn.Linear(4, 2))
    assert not is_linear(mlp(4, 2, [3]))
    assert not is_linear(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)))
    assert not is_linear(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()))


def test_refusals() -> None:
    with pytest.raises(InputError, match="weights"):
        measured((1.0, 0.0))
    with pytest.raises(InputError, match="more rounds"):
        measured((0.5, 0.5), rounds=0)


def test_clients_count_alike_whatever_they_hold() -> None:
    """Client 0 has three examples at 1, client 1 one at 3: a = ½·mean(−1, −3) = −1 at w = 0, as in the first test."""
    model, (_, centre) = point([0.0]), quadratics()
    setup = Setup(trainer(model, 0.1, 5), sgd(1.0), 10, trainer(model, 0.1, 5), weights=(0.5, 0.5))
    x = np.array([[1.0], [1.0], [1.0], [3.0]])
    clients = FederatedData.from_arrays({"x": x, "c": np.ones_like(x)}, np.array([0, 0, 0, 1]))
    found = measure_dissimilarity(setup, clients, centre, cohort=2, rounds=1, repeats=1, first_round=0)
    assert found.measured["G2"][0, 0] == pytest.approx(25.0)


def test_steps_of_clients_that_train_by_epochs() -> None:
    """Clients of 4, 10 and 25 examples in batches of 10 take 1, 1 and 3 steps an epoch."""
    clients = FederatedData.from_arrays({"x": np.zeros((39, 1))}, np.repeat([0, 1, 2], [4, 10, 25]))
    assert local_steps(Training(batch_size=10, epochs=5), clients) == 5
    assert local_steps(Training(batch_size=3, epochs=2), clients) == 8  # 2, 4 and 9 steps an epoch
    assert local_steps(Training(batch_size=0, epochs=2), clients) == 2
    assert local_steps(Training(batch_size=10, steps=7), clients) == 7
