"""The adversary: a step by hand, executors, gaps, and a fresh adversary that finds what is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mixfed.algorithms.fair import Minimax
from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.local_global import local_global, named
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching, plan_cohort
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.loop import Result
from mixfed.core.losses import binary_cross_entropy, squared_error
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.data.batch import Batch
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.evaluate.fairness import adversary_test, postfit_test
from mixfed.evaluate.metrics import odds_gap, parity_gap
from mixfed.models.networks import mlp
from mixfed.models.parts import Parts, first_only, with_auxiliary


def linear(value: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def squared_adversary(parts: nn.Module, h: torch.Tensor, batch: Batch) -> torch.Tensor:
    """½(a·h − p)²: a linear adversary whose gradients are easy by hand."""
    difference = parts.auxiliary(h) - batch["protected"].reshape(-1, 1).to(h.dtype)  # type: ignore[operator]
    return 0.5 * difference.square().sum(1)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_minimax_step_by_hand(executor: str) -> None:
    # h = ℓx, ŷ = gh, p̂ = ah, squared losses; ℓ = 1, g = 2, a = 0.5; x = 1, y = 3, p = 1; rate 0.1, λ = 2.
    # Adversary first: residual ah − p = −0.5, a ← 0.5 + 0.1·0.5·1 = 0.55.
    # Then L_g − λL_a: prediction residual gℓ − y = −1, adversary residual 0.55 − 1 = −0.45.
    # ∂ℓ = −1·g·x − λ·(−0.45)·a·x = −2 + 2·0.45·0.55 = −1.505, ℓ ← 1.1505.
    # ∂g = −1·h = −1, g ← 2.1.
    # While pre-training (λ = 0): ∂ℓ = −2, ℓ ← 1.2.
    # With two steps of the adversary: a ← 0.55 + 0.1·0.45 = 0.595, ∂ℓ = −2 + 2·0.405·0.595 = −1.51805, ℓ ← 1.151805.
    module = Parts(linear(1.0), linear(2.0), linear(0.5), squared_adversary)
    model = Model(module, first_only(squared_error), forward=lambda m, batch: m(batch), dtype=torch.float64)
    data = FederatedData.from_datasets([{"x": np.ones((1, 1)), "y": np.full(1, 3.0), "protected": np.ones((1, 1))}] * 2)
    for pretrain, steps, local, against in ((0, 1, 1.1505, 0.55), (1, 1, 1.2, 0.55), (0, 2, 1.151805, 0.595)):
        trainer = Minimax(model, sgd(0.1), Batching(0, steps=1), strength=2.0, pretrain=pretrain, adversary_steps=steps)
        algorithm = local_global(fedavg(trainer), named(["head."]))
        result = run(algorithm, data, rounds=1, cohort=2, backend=Simulator(executor))
        for _, private in result.privates.items("clients"):  # type: ignore[union-attr]
            assert float(private["local"]["encoder.weight"]) == pytest.approx(local, abs=1e-12)
            assert float(private["local"]["auxiliary.weight"]) == pytest.approx(against, abs=1e-12)
        assert float(result.params["head.weight"]) == pytest.approx(2.1, abs=1e-12)
        assert result.ledger["bytes_up"] == 2 * 8


def test_steps_in_turn_by_hand() -> None:
    # The numbers of the test before, in the paper's order.
    # ℓ: ∂ℓ = −1·g − λ·(−0.5)·a = −2 + 0.5 = −1.5, ℓ ← 1.15.
    # g: residual 2·1.15 − 3 = −0.7, ∂g = −0.7·1.15 = −0.805, g ← 2.0805.
    # a: residual 0.5·1.15 − 1 = −0.425, ∂a = −0.425·1.15 = −0.48875, a ← 0.548875.
    module = Parts(linear(1.0), linear(2.0), linear(0.5), squared_adversary)
    model = Model(module, first_only(squared_error), forward=lambda m, batch: m(batch), dtype=torch.float64)
    data = FederatedData.from_datasets([{"x": np.ones((1, 1)), "y": np.full(1, 3.0), "protected": np.ones((1, 1))}] * 2)
    trainer = Minimax(model, sgd(0.1), Batching(0, steps=1), strength=2.0, in_turn=True)
    result = run(fedavg(trainer), data, rounds=1, cohort=2, backend=Simulator("loop"))
    for name, value in {"encoder.weight": 1.15, "head.weight": 2.0805, "auxiliary.weight": 0.548875}.items():
        assert float(result.params[name]) == pytest.approx(value, abs=1e-12)


def census(clients: int = 3, examples: int = 120) -> FederatedData:
    """y depends on x₀, the protected attribute shows in x₁; ragged clients."""
    draw = np.random.default_rng(0)
    n = clients * examples
    protected = draw.integers(0, 2, (n, 1))
    x = draw.normal(size=(n, 3)).astype(np.float32)
    x[:, 1] += 3 * protected[:, 0]
    owners = np.sort(draw.integers(0, clients, n))
    return FederatedData.from_arrays({"x": x, "y": (x[:, 0] > 0).astype(np.int64), "protected": protected}, owners)


def fair_model() -> Model:
    torch.manual_seed(0)
    parts = with_auxiliary(mlp(3, 1, [8, 8]), torch.zeros(3), "adversary", layers=1, classes=1, hidden=[8], dropout=0.0)
    return Model(parts, first_only(binary_cross_entropy), forward=lambda m, batch: m(batch))


def test_executors_agree() -> None:
    found = []
    for executor in ("loop", "vmap"):
        trainer = Minimax(fair_model(), sgd(0.1, momentum=0.5), Batching(16, epochs=1), strength=1.0, clip=1.0)
        algorithm = local_global(fedavg(trainer), named(["head."]))
        found.append(run(algorithm, census(), rounds=3, cohort=3, backend=Simulator(executor)))
    for name, x in found[0].params.items():
        torch.testing.assert_close(x, found[1].params[name], rtol=2e-5, atol=2e-6)
    for a, b in zip(*(r.privates.items("clients") for r in found), strict=True):  # type: ignore[union-attr]
        for name, x in a[1]["local"].items():
            torch.testing.assert_close(x, b[1]["local"][name], rtol=2e-5, atol=2e-6)


def test_the_gradient_to_share_is_the_one_that_every_part_followed() -> None:
    """The first step of momentum SGD is η·g, so that every leaf has moved by −η times its part of the sum."""
    trainer = Minimax(fair_model(), sgd(0.1, momentum=0.5), Batching(0, steps=1), strength=2.0)
    start = trainer.model.initial()
    batches = plan_cohort("clients", census(), np.arange(3), trainer.batching, 0, 0).client(0)
    end = trainer.train(start, batches, want_gradient=True)
    assert end.gradient_sum is not None
    assert end.gradient_sum.keys() == start.keys()
    for name, g in end.gradient_sum.items():
        torch.testing.assert_close(start[name] - 0.1 * g, end.params[name])


def test_a_fresh_adversary_reads_what_was_not_hidden() -> None:
    data = census()
    trainer = Minimax(fair_model(), sgd(0.1), Batching(16, epochs=1), strength=0.0)
    algorithm = local_global(fedavg(trainer), named(["head."]))
    result = run(algorithm, data, rounds=8, cohort=3, backend=Simulator("loop"))
    module = algorithm.model.module()
    known = adversary_test(algorithm, module, data)(result.params, result.privates)  # type: ignore[arg-type]
    fresh = postfit_test(algorithm, module, data, data, hidden=[8])(result.params, result.privates)  # type: ignore[arg-type]
    assert known["adversary_auc"] > 0.8
    assert fresh["postfit_auc"] > 0.9


def test_clients_without_test_examples_leave_the_others_their_own_adversary() -> None:
    """Client 1 says the attribute by x₁, client 2 by −x₁: asked about the other one's, an adversary would be wrong."""
    draw = np.random.default_rng(1)

    def people(n: int, sign: int) -> dict[str, np.ndarray]:
        protected = draw.integers(0, 2, (n, 1))
        x = draw.normal(size=(n, 3)).astype(np.float32)
        x[:, 1] = sign * (4 * protected[:, 0] - 2)
        return {"x": x, "y": np.zeros(n, np.int64), "protected": protected}

    train = FederatedData.from_datasets([people(200, 1), people(200, 1), people(200, -1)])
    both = [people(60, 1), people(60, -1)]
    rows = [np.arange(0), np.arange(60), np.arange(60, 120)]
    test = FederatedData.from_groups({n: np.concatenate([p[n] for p in both]) for n in both[0]}, rows)
    model = fair_model()
    trainer = Minimax(model, sgd(1e-9), Batching(16, epochs=1), strength=0.0)
    algorithm = local_global(fedavg(trainer), named(["head."]))
    result = run(algorithm, train, rounds=1, cohort=3, backend=Simulator("loop"))
    assert test.sizes().tolist() == [0, 60, 60]
    fresh = postfit_test(algorithm, model.module(), train, test, hidden=[8])(result.params, result.privates)  # type: ignore[arg-type]
    assert fresh["postfit_auc"] > 0.95


def test_pre_training_costs_what_a_resumed_run_says(tmp_path: Path) -> None:
    def algorithm() -> Algorithm:
        trainer = Minimax(fair_model(), sgd(0.1), Batching(16, epochs=1), strength=1.0, pretrain=2)
        return local_global(fedavg(trainer), named(["head."]))

    def trained(rounds: int, name: str, *, resume: bool = False) -> Result:
        kept = Checkpoints(tmp_path / name, every=1)
        simulator = Simulator("loop")
        return run(algorithm(), census(), rounds=rounds, cohort=3, backend=simulator, checkpoints=kept, resume=resume)

    straight = trained(5, "a")
    trained(3, "b")
    assert trained(5, "b", resume=True).ledger == straight.ledger


def test_gaps_skip_groups_that_are_empty() -> None:
    found = {
        "scores": np.array([1.0, 1, -1, -1]),
        "y": np.array([0, 0, 0, 0]),
        "protected": np.array([[1, 1], [1, 1], [1, 0], [1, 0]]),
    }
    for order in ([0, 1], [1, 0]):
        swapped = found | {"protected": found["protected"][:, order]}
        assert parity_gap(swapped) == odds_gap(swapped) == 1.0
    assert np.isnan(parity_gap(found | {"protected": np.ones((4, 1))}))


def test_gaps_by_hand() -> None:
    # Group 1: ŷ = 1 for 3 of 4; group 0: for 1 of 4.
    # Given y = 1: 2 of 2 against 1 of 2; given y = 0: 1 of 2 against 0 of 2.
    found = {
        "scores": np.array([1.0, 1, 1, -1, 1, -1, -1, -1]),
        "y": np.array([1, 1, 0, 0, 1, 1, 0, 0]),
        "protected": np.array([[1], [1], [1], [1], [0], [0], [0], [0]]),
    }
    assert parity_gap(found) == pytest.approx(0.5)
    assert odds_gap(found) == pytest.approx(0.5)


def test_refusals() -> None:
    plain = Model(mlp(2, 1), binary_cross_entropy)
    with pytest.raises(InputError, match="needs a network with an auxiliary model"):
        Minimax(plain, sgd(0.1), Batching(1, steps=1))
    with pytest.raises(InputError, match="cannot be negative"):
        Minimax(fair_model(), sgd(0.1), Batching(1, steps=1), strength=-1.0)
    with pytest.raises(InputError, match="1 or more steps"):
        Minimax(fair_model(), sgd(0.1), Batching(1, steps=1), adversary_steps=0)
    with pytest.raises(InputError, match="say which attributes are protected"):
        parity_gap({"scores": np.ones(2), "y": np.ones(2)})
