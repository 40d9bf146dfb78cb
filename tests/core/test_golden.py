"""Rounds worked out by hand on quadratics, and methods that must coincide with plain SGD.

The model is a point w with loss ½(w − a)² for an example a, so a full-batch step of rate ½ halves the distance to the
mean of the client's examples. Client A has 1 and 3 (mean 2), client B has −2; two steps each, from w:

    Δ_A = ¾(2 − w), p_A = 2 steps · 2 examples = 4        Δ_B = ¾(−2 − w), p_B = 2 · 1 = 2
    Δ   = (4Δ_A + 2Δ_B)/6 = ½ − ¾w
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mixfed.algorithms.baselines import center, local, transfer
from mixfed.algorithms.fedavg import fedadagrad, fedadam, fedavg, fedavgm, fedprox, fedyogi
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from tests.core.helpers import assert_close, clients, train
from tests.problems import central, point, small_mlp, targets, trainer

A_AND_B = targets([[1.0], [3.0]], [[-2.0]])


def path(algorithm: Algorithm, rounds: int = 2) -> list[float]:
    """w after each round."""
    seen: list[float] = []
    train(algorithm, A_AND_B, rounds=rounds, callbacks=[lambda record: seen.append(float(record.params["w"]))])
    return seen


def two_steps() -> LocalTrainer:
    return trainer(point([0.0]), 0.5, steps=2)


def test_fedavg() -> None:
    """w: 0 → ½ → ½ + (½ − ⅜) = 0.625."""
    assert path(fedavg(two_steps())) == pytest.approx([0.5, 0.625], abs=1e-12)


def test_fedavg_with_rate_decay() -> None:
    """Rates ½ and ¼: in round 2 a step leaves ¾ of the distance, two leave 9/16, so Δ = 7/16·((4·2 − 2·2)/6 − w)."""
    model = point([0.0])
    decayed = LocalTrainer(model, sgd(0.5, decay=0.5), Batching(0, steps=2))
    assert path(fedavg(decayed)) == pytest.approx([0.5, 0.5 + 7 / 16 * (2 / 3 - 0.5)], abs=1e-12)


def test_fedprox() -> None:
    """μ = 1: gradient (w − a) + (w − w⁽ᵗ⁾). From 0, A: 0 → 1 → 1 (−1 + 1 = 0), B: 0 → −1 → −1; Δ = (4 − 2)/6.

    From w⁽ᵗ⁾ in general the first step goes half way and the second stands still: Δ_A = ½(2 − w), Δ = ⅓ − ½w.
    """
    assert path(fedprox(two_steps(), mu=1.0)) == pytest.approx([1 / 3, 1 / 3 + 1 / 3 - 1 / 6], abs=1e-12)


def test_fedavgm() -> None:
    """m = −½, w = ½; Δ = ½ − ⅜ = ⅛, m = −0.45 − 0.125 = −0.575, w = 1.075."""
    assert path(fedavgm(two_steps(), momentum=0.9)) == pytest.approx([0.5, 1.075], abs=1e-12)


def test_fedadam() -> None:
    """β = (0.9, 0.99), τ = 1e-3, rate 0.1, no bias correction.

    g = −½:        m = −0.05,       v = 0.0025       √v = 0.05        w = 0.1·0.05/0.051       = 0.09803922
    g = −0.426471: m = −0.08764706, v = 0.004293772  √v = 0.06552688  w = 0.09803922 + 0.1·0.08764706/0.06652688
    """
    assert path(fedadam(two_steps(), learning_rate=0.1)) == pytest.approx([0.0980392157, 0.2297860], abs=1e-7)


def test_fedyogi() -> None:
    """As FedAdam, but v grows by 0.01·g² without shrinking: v = 0.0025 + 0.001818772 = 0.004318772, √v = 0.06571737."""
    expected = [0.0980392157, 0.0980392157 + 0.1 * 0.08764706 / 0.06671737]
    assert path(fedyogi(two_steps(), learning_rate=0.1)) == pytest.approx(expected, abs=1e-7)


def test_fedadagrad() -> None:
    """v = 0.25: w = 0.1·0.5/0.501 = 0.09980040; g = −0.42514970, v = 0.43075227, √v = 0.65631720."""
    expected = [0.0998003992, 0.0998003992 + 0.1 * 0.4251497006 / 0.6573172]
    assert path(fedadagrad(two_steps(), learning_rate=0.1)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_fedprox_without_mu_is_fedavg(executor: str) -> None:
    data = clients([3, 7, 5], (2,), 3)
    trainer = LocalTrainer(small_mlp(), sgd(0.2), Batching(2, epochs=2))
    prox, avg = (train(a, data, executor, rounds=3).params for a in (fedprox(trainer, mu=0.0), fedavg(trainer)))
    assert_close(prox, avg, 1e-7)


def plain_sgd(model: Model, batches: list[dict[str, np.ndarray]], rate: float, start: Params | None = None) -> Params:
    """torch.optim.SGD on these batches."""
    weights = {n: torch.nn.Parameter(x.clone()) for n, x in (start or model.initial()).items()}
    optimizer = torch.optim.SGD(weights.values(), rate)
    for batch in batches:
        optimizer.zero_grad()
        model.loss(dict(weights), {n: torch.from_numpy(np.asarray(x)) for n, x in batch.items()}).backward()
        optimizer.step()
    return {n: w.detach() for n, w in weights.items()}


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_one_client_and_one_step_is_sgd(executor: str) -> None:
    data, model = clients([6], (2,), 3), small_mlp()
    result = train(fedavg(LocalTrainer(model, sgd(0.3), Batching(0, steps=1))), data, executor, rounds=4)
    assert_close(result.params, plain_sgd(model, [data.arrays] * 4, 0.3), 1e-6)


def in_order(arrays: dict[str, np.ndarray], size: int, steps: int) -> list[dict[str, np.ndarray]]:
    n = len(arrays["x"])
    starts = [start for _ in range(steps) for start in range(0, n, size)][:steps]
    return [{name: a[s : s + size] for name, a in arrays.items()} for s in starts]


def test_center_is_sgd_on_the_central_data() -> None:
    """Three rounds of four steps are twelve steps of one stream: 7 examples in batches of 3, 3, 1, 3, 3, 1, …"""
    data, model = clients([7], (2,), 3).pooled(), small_mlp()
    algorithm = center(LocalTrainer(model, sgd(0.1), Batching(3, steps=4, shuffle=False)))
    result = train(algorithm, {}, rounds=3, central=data)
    assert_close(result.params, plain_sgd(model, in_order(data.arrays, 3, 12), 0.1), 1e-6)


def test_local_only_trains_each_client_alone() -> None:
    data, model = clients([5, 2, 4], (2,), 3), small_mlp()
    result = train(local(LocalTrainer(model, sgd(0.2), Batching(2, epochs=1, shuffle=False))), data, rounds=3)
    for c, private in result.privates.items("clients"):
        arrays = data.client(c)
        epoch = in_order(arrays, 2, -(-len(arrays["x"]) // 2))
        assert_close(private["params"], plain_sgd(model, epoch * 3, 0.2), 1e-6)
    assert_close(result.params, model.initial(), 0)
    assert result.ledger["bytes_down"] == result.ledger["bytes_up"] == 0


def test_transfer_is_center_and_then_fedavg() -> None:
    """At the centre (one example at 4): 0 → 2 → 3 in two rounds of one step; then FedAvg: w + ½ − ¾w."""
    model = point([0.0])
    algorithm = transfer(trainer(model, 0.5, steps=2), trainer(model, 0.5), central_rounds=2)
    seen: list[float] = []
    examples = central([4.0])
    result = train(
        algorithm, A_AND_B, rounds=4, central=examples, callbacks=[lambda r: seen.append(float(r.params["w"]))]
    )
    assert seen == pytest.approx([2.0, 3.0, 1.25, 0.5 + 1.25 / 4], abs=1e-12)
    assert (result.ledger["server_examples"], result.ledger["client_examples"]) == (2, 2 * 6)


def test_cross_entropy_over_positions() -> None:
    """A sequence's loss is the mean over its positions."""
    outputs, labels = torch.randn(2, 5, 3), torch.randint(0, 3, (2, 5))
    expected = [torch.nn.functional.cross_entropy(outputs[i], labels[i]) for i in range(2)]
    torch.testing.assert_close(cross_entropy(outputs, {"y": labels}), torch.stack(expected))
