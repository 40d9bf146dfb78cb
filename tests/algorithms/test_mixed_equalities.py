"""Equalities between methods, and what they converge to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mixfed.algorithms.baselines import center
from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.mixed import Centre, Population, gradient_1way, gradient_2way, parallel
from mixfed.backends.run import run
from mixfed.backends.simulator import Simulator
from mixfed.core import optim
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.model import Model
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from tests.problems import blobs, central, point, small_mlp, targets, trainer

FEDERATED, CENTRAL, _ = blobs()


def learnt(algorithm: Algorithm, rounds: int = 5) -> Params:
    return run(algorithm, FEDERATED, central=CENTRAL, rounds=rounds, cohort=6, seed=1, backend=Simulator("loop")).params


def assert_same(a: Algorithm, b: Algorithm) -> None:
    left, right = learnt(a), learnt(b)
    for name, x in left.items():
        torch.testing.assert_close(x, right[name], rtol=1e-9, atol=1e-10)


def mlp_trainer(model: Model, steps: int, rate: float = 0.1) -> LocalTrainer:
    return LocalTrainer(model, optim.sgd(rate), Batching(4, steps=steps))


def test_with_one_step_parallel_training_is_one_way_transfer() -> None:
    model = small_mlp(dtype=torch.float64)
    clients, centre = mlp_trainer(model, 1), mlp_trainer(model, 1)
    assert_same(parallel(clients, centre), gradient_1way(clients, centre))


def test_without_a_central_loss_one_way_transfer_is_fedavg() -> None:
    model = small_mlp(dtype=torch.float64)
    clients = mlp_trainer(model, 3)
    nothing = Centre(mlp_trainer(model, 3), weight=0.0)
    assert_same(gradient_1way(clients, nothing), fedavg(clients))
    assert_same(parallel(clients, nothing), fedavg(clients))


def test_without_a_federated_loss_parallel_training_is_central_training() -> None:
    model = small_mlp(dtype=torch.float64)
    centre = mlp_trainer(model, 3)
    assert_same(parallel(Population(mlp_trainer(model, 3), weight=0.0), centre), center(centre))


def test_two_sources_are_the_general_form_with_two() -> None:
    model = small_mlp(dtype=torch.float64)
    clients, centre = mlp_trainer(model, 3), mlp_trainer(model, 2)
    assert_same(parallel(clients, centre), parallel([Population(clients)], [Centre(centre)]))
    assert_same(gradient_2way(clients, centre), gradient_2way([Population(clients)], [Centre(centre)]))


# Quadratics with identical clients: f_f = ½(w − 2)², f_c = ½·4·(w + 1)², so the joint optimum is (2 − 4)/5 = −0.4.
OPTIMUM = -0.4


def quadratics() -> tuple[FederatedData, CentralData]:
    twos = FederatedData.from_arrays({"x": np.full((5, 1), 2.0), "c": np.ones((5, 1))}, np.arange(5))
    return twos, CentralData({"x": np.full((1, 1), -1.0), "c": np.full((1, 1), 4.0)})


def distance(algorithm: Algorithm, rounds: int) -> float:
    clients, centre = quadratics()
    result = run(algorithm, clients, central=centre, rounds=rounds, cohort=3)
    return abs(float(result.params["w"][0]) - OPTIMUM)


def test_transfers_reach_the_joint_optimum() -> None:
    model = point([3.0])
    assert distance(gradient_1way(trainer(model, 0.02, 5), trainer(model, 0.02, 5)), 100) < 1e-10
    assert distance(gradient_2way(trainer(model, 0.02, 5), trainer(model, 0.02, 5)), 100) < 1e-10


def test_parallel_training_stops_short_by_a_distance_that_shrinks_with_the_rate() -> None:
    model = point([3.0])

    def stops_at(rate: float) -> float:
        return distance(parallel(trainer(model, rate, 5), trainer(model, rate, 5)), round(2 / rate))

    coarse, middle, fine = stops_at(0.04), stops_at(0.02), stops_at(0.01)
    assert coarse > 0.01
    assert coarse > 1.5 * middle > 1.5 * 1.5 * fine > 0
    assert distance(parallel(trainer(model, 0.04, 1), trainer(model, 0.04, 1)), 150) < 1e-10


def populations(model: Model, rate: float, steps: int) -> list[Population]:
    return [
        Population(trainer(model, rate, steps), name="phones"),
        Population(trainer(model, rate, steps), weight=0.5, name="cars"),
    ]


def many_sources(
    start: float = 3.0, **chosen: object
) -> tuple[Model, dict[str, FederatedData], dict[str, CentralData]]:
    def clients(target: float) -> FederatedData:
        return FederatedData.from_arrays({"x": np.full((4, 1), target)}, np.arange(4))

    data = {"phones": clients(2.0), "cars": clients(-4.0)}
    centre = {"corpus": CentralData({"x": np.full((1, 1), 1.0)}), "archive": CentralData({"x": np.full((1, 1), 5.0)})}
    return point([start]), data, centre


def test_two_populations_without_a_centre_learn_jointly() -> None:
    # ½(w − 2)² + 0.5·½(w + 4)² is least at (2 − 2)/1.5 = 0.
    model, data, _ = many_sources()
    for cohort in (2, {"phones": 3, "cars": 1}):
        result = run(gradient_2way(populations(model, 0.03, 4)), data, rounds=200, cohort=cohort)
        assert abs(float(result.params["w"][0])) < 1e-10


def test_four_sources_take_the_sum_of_their_gradients_in_one_step() -> None:
    # At 3: phones 1, cars 0.5·7 = 3.5, corpus 2·2 = 4, archive −2; their sum is 6.5 and the step is −0.1·6.5.
    model, data, centre = many_sources()
    centres = [Centre(trainer(model, 0.1), weight=2.0, name="corpus"), Centre(trainer(model, 0.1), name="archive")]
    for algorithm in (
        parallel(populations(model, 0.1, 1), centres),
        gradient_1way(populations(model, 0.1, 1), centres),
    ):
        result = run(algorithm, data, central=centre, rounds=1, cohort=2)
        assert float(result.params["w"][0]) == pytest.approx(3 - 0.65, abs=1e-12)


def test_four_sources_reach_the_joint_optimum() -> None:
    # (2 + 0.5·(−4) + 2·1 + 5)/(1 + 0.5 + 2 + 1) = 7/4.5.
    model, data, centre = many_sources()
    centres = [
        Centre(trainer(model, 0.01, 4), weight=2.0, name="corpus"),
        Centre(trainer(model, 0.01, 4), name="archive"),
    ]
    result = run(gradient_2way(populations(model, 0.01, 4), centres), data, central=centre, rounds=250, cohort=2)
    assert float(result.params["w"][0]) == pytest.approx(7 / 4.5, abs=1e-10)


def test_a_central_loss_may_need_no_data() -> None:
    # Clients pull to 2, the centre's loss is ½·4·(w + 1)² as a function of w alone: again −0.4.
    model = point([3.0])

    def pull(params: Params, batch: Batch) -> torch.Tensor:
        return 2.0 * (params["w"] + 1.0).square().sum()

    without = Centre(replace(trainer(model, 0.02, 5), loss=pull), needs_data=False)
    clients, _ = quadratics()
    for algorithm in (
        gradient_1way(trainer(model, 0.02, 5), without),
        gradient_2way(trainer(model, 0.02, 5), without),
    ):
        result = run(algorithm, clients, rounds=100, cohort=3)
        assert float(result.params["w"][0]) == pytest.approx(OPTIMUM, abs=1e-10)
        assert result.ledger["server_examples"] == 0


def test_with_adaptive_optimizers_the_transfers_still_reach_the_joint_optimum_and_parallel_training_does_not() -> None:
    model = point([3.0])
    clients, centre = trainer(model, 0.02, 5), trainer(model, 0.02, 5)
    adaptive = optim.adam(0.1, decay=0.995, epsilon=1e-3)
    assert distance(gradient_2way(clients, centre, merge=adaptive), 400) < 1e-6
    assert distance(gradient_1way(Population(clients, server=adaptive), centre), 400) < 1e-6
    assert distance(parallel(clients, centre, merge=adaptive), 400) > 0.05


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: parallel(t, t, alpha=1.5), "alpha"),
        (lambda t: parallel([Population(t), Population(t)]), "names of their own"),
        (lambda t: gradient_2way(t), "second source"),
        (lambda t: gradient_1way(t, []), "centre"),
        (lambda t: parallel(t, Centre(t, weight=-1.0)), "weight"),
        (lambda t: parallel([], t), "population"),
        (lambda t: gradient_1way(t, Centre(t, needs_data=False)), "loss"),
        (lambda t: parallel(t, trainer(point([0.0]), 0.1)), "one model"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(make: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(trainer(point([0.0]), 0.1))  # type: ignore[operator]


def test_missing_central_data_is_named() -> None:
    model = point([0.0])
    clients, _ = quadratics()
    with pytest.raises(InputError, match="central data 'centre'"):
        run(parallel(trainer(model, 0.1), trainer(model, 0.1)), clients, rounds=1, cohort=1)


@pytest.mark.parametrize("by_clients", [False, True])
def test_the_gradient_of_clients_is_weighted_by_examples_or_as_equation_10_says(by_clients: bool) -> None:
    # One step each from 0 on all examples: client 0 has three at 4 (g = −4), client 1 one at 8 (g = −8). Weighted by
    # examples the mean gradient is −(3·4 + 8)/4 = −5, and plainly −6. The update is weighted in both cases: 0.1·5.
    model = point([0.0])
    clients, centre = targets([[4.0], [4.0], [4.0]], [[8.0]]), central([0.0])
    algorithm = gradient_2way(trainer(model, 0.1), trainer(model, 0.1), by_clients=by_clients)
    result = run(algorithm, clients, central=centre, rounds=1, cohort=2)
    assert float(result.params["w"]) == pytest.approx(0.5)
    assert float(result.state["gradients"]["clients"]["w"]) == pytest.approx(-6.0 if by_clients else -5.0)
