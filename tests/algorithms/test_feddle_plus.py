"""Feddle+: what it is with parts switched off, what it reaches that Feddle cannot, and whom it trusts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mixfed.algorithms.asynchronous import fedbuff
from mixfed.algorithms.feddle.central import CentralAnchor
from mixfed.algorithms.feddle.search import Search, feddle, feddle_plus
from mixfed.algorithms.hybrid import fed_ft
from mixfed.algorithms.makers import Setup
from mixfed.algorithms.registry import ALGORITHMS
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.delays import HalfNormal
from mixfed.core.loop import Result
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.evaluate.metrics import evaluator
from tests.problems import Point, blobs, central, half_square, point, small_mlp, targets, trainer


def trained(algorithm: Algorithm, rounds: int = 8, **options: Any) -> Result:
    federated, server_data, _ = blobs()
    how: dict[str, Any] = {"seed": 2, "schedule": Schedule(4, delays=HalfNormal(1.5)), "central": server_data}
    return run(algorithm, federated, rounds=rounds, backend=Simulator("loop", threads=1), **how | options)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_without_a_search_it_is_fed_ft_and_without_its_own_update_fedbuff(share: float) -> None:
    model = small_mlp(dtype=torch.float64)
    local, centre = (LocalTrainer(model, sgd(0.1), Batching(n, steps=3)) for n in (3, 8))
    off = Search(Batching(8, steps=2), active=False)
    found = trained(feddle_plus(local, off, CentralAnchor(centre, share, held_out=0.0), atlas=9))
    base = fedbuff(local, buffer=0)
    expected = trained(fed_ft(base, centre) if share else base)
    for name, x in expected.params.items():
        torch.testing.assert_close(found.params[name], x, rtol=1e-9, atol=1e-10)


def test_it_leaves_the_span_of_the_clients_updates() -> None:
    # One client pulls x = (0, 0) to (2, 0), which is where the fallback goes; the centre wants (3, −2). With rate ½ its
    # update is d = ½(1, −2). 2c + e/2 = 3 and −e = −2 at the best: e = 2 and c = 1, where d̄ = d·2/‖d‖, ‖d‖ = √1.25.
    # Feddle cannot do better than (3, 0).
    model = point([0.0, 0.0])
    local, search = trainer(model, 1.0), Search(Batching(0, steps=1500), learning_rate=0.01)
    goal, clients = central([3.0, -2.0]), targets([[2.0, 0.0]])
    plus = feddle_plus(local, search, CentralAnchor(trainer(model, 0.5), held_out=0.0), atlas=2)
    found = run(plus, clients, central=goal, rounds=1, cohort=1)
    assert found.params["w"].tolist() == pytest.approx([3.0, -2.0], abs=1e-3)
    assert found.diagnostics[0]["central_share"] == pytest.approx(2.0, abs=1e-3)
    assert found.diagnostics[0]["coefficient_max"] == pytest.approx(1.0, abs=1e-3)
    alone = run(feddle(local, search, atlas=2), clients, central=goal, rounds=1, cohort=1)
    assert alone.params["w"].tolist() == pytest.approx([3.0, 0.0], abs=1e-3)


def test_classes_that_only_the_server_has_are_learnt_and_nobody_is_warned() -> None:
    federated, server_data, test = blobs()
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(3, epochs=2))
    setup = Setup(local, sgd(1.0), 30, LocalTrainer(local.model, sgd(0.1), Batching(8, steps=5)))
    of_centre = test.select(test.arrays["y"] == 2)
    results = {
        name: run(
            ALGORITHMS[name].make(setup),
            federated,
            central=server_data,
            rounds=30,
            cohort=6,
            evaluate=evaluator(local.model, of_centre),
        )
        for name in ("feddle", "feddle_plus")
    }
    assert results["feddle_plus"].metrics["accuracy"] > 0.7 > 0.3 > results["feddle"].metrics["accuracy"]
    assert any("cannot learn" in warning for warning in results["feddle"].warnings)
    assert not any("cannot learn" in warning for warning in results["feddle_plus"].warnings)


@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_an_update_that_only_fits_its_own_examples_is_trusted_only_if_they_judge_it(held_out: float) -> None:
    """The server's labels are drawn at random, and there are more weights than examples: fitting them teaches nothing
    that is true of others."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 200)).astype(np.float32), draw.integers(0, 2, 60)
    clients = FederatedData.from_arrays({"x": x[:20] * 0.1, "y": y[:20]}, np.arange(20) % 4)
    torch.manual_seed(0)
    model = Model(nn.Linear(200, 2), cross_entropy)
    local, centre = (LocalTrainer(model, sgd(0.1), Batching(0, steps=n)) for n in (1, 40))
    search = Search(Batching(0, steps=400), learning_rate=0.05)
    plus = feddle_plus(local, search, CentralAnchor(centre, held_out=held_out), atlas=4)
    result = run(plus, clients, central=CentralData({"x": x, "y": y}), rounds=1, cohort=4)
    taken = result.diagnostics[0]["central_share"]
    assert taken > 1.5 if not held_out else taken < 0.5


def test_the_held_out_examples_are_drawn_anew_and_never_fitted_in_their_round() -> None:
    fitted: list[list[float]] = []
    judged: list[list[float]] = []

    def told(to: list[list[float]]) -> Any:
        def loss(outputs: Any, batch: Any) -> Any:
            to.append(sorted(batch["x"][:, 0].tolist()))
            return half_square(outputs, batch)

        return loss

    model = Model(Point([0.0]), told(judged), dtype=torch.float64)
    own_loss = lambda params, batch: told(fitted)(model.outputs(params, batch, training=True), batch).mean()  # noqa: E731
    centre = LocalTrainer(model, sgd(0.1), Batching(0, steps=1), loss=own_loss)
    examples = CentralData({"x": np.array([[1.0], [2.0], [4.0], [8.0]])})
    plus = feddle_plus(trainer(model, 1.0), Search(Batching(0, steps=1)), CentralAnchor(centre, held_out=0.5), atlas=2)
    run(plus, targets([[3.0]]), central=examples, rounds=8, cohort=1)
    fits = [x for x in fitted if len(set(x)) == 2]  # the ledger measures a step on one example, repeated
    judges = [x for x in judged if len(set(x)) == 2]
    assert len(fits) == len(judges) == 8
    assert all(sorted(a + b) == [1.0, 2.0, 4.0, 8.0] for a, b in zip(fits, judges, strict=True))
    assert len({tuple(x) for x in fits}) > 1


def test_one_example_is_enough_and_nonsense_is_refused() -> None:
    model = point([0.0, 0.0])
    local, search = trainer(model, 1.0), Search(Batching(0, steps=2))
    plus = feddle_plus(local, search, CentralAnchor(local), atlas=2)
    assert run(plus, targets([[2.0, 0.0]]), central=central([3.0, -2.0]), rounds=1, cohort=1).finished
    with pytest.raises(InputError, match="'held_out' of CentralAnchor"):
        CentralAnchor(local, held_out=1.0)
    with pytest.raises(InputError, match="another domain"):
        feddle_plus(local, Search(Batching(1, steps=1), "out_of_domain"), CentralAnchor(local))
    with pytest.raises(InputError, match="one model"):
        feddle_plus(local, search, CentralAnchor(trainer(point([0.0, 0.0]), 1.0)))
    other = Setup(local, sgd(1.0), 1, local, of_other_domain=True)
    with pytest.raises(InputError, match="another domain"):
        ALGORITHMS["feddle_plus"].make(other)
