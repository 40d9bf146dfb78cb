"""Feddle: the atlas, the search, and what it is with parts switched off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixfed.algorithms.asynchronous import ca2fl, fedasync, fedbuff
from mixfed.algorithms.baselines import center
from mixfed.algorithms.baselines import local as alone
from mixfed.algorithms.fedavg import fedadam, fedavg
from mixfed.algorithms.feddle.atlas import BLOCK, Atlas, flat, unflat
from mixfed.algorithms.feddle.fallbacks import like_fedavg, like_fedbuff
from mixfed.algorithms.feddle.guidance import Guide, Head, Merged, head_of, surrogate
from mixfed.algorithms.feddle.search import Search, feddle, searched
from mixfed.algorithms.makers import Setup
from mixfed.algorithms.registry import ALGORITHMS
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import Algorithm, Reply, Server
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import HalfNormal
from mixfed.core.loop import Result
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import adam, sgd
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.data.store import CentralData
from mixfed.errors import InputError
from mixfed.evaluate.metrics import evaluator
from tests.problems import blobs, central, point, small_mlp, targets


def vectors(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


def atlas_of(size: int, *rows: list[float], bits: int = 32) -> Atlas:
    empty = Atlas.empty(size, len(rows[0]), bits, torch.device("cpu"), torch.float64)
    return empty.with_updates(vectors(*rows), 0)[0]


def column(atlas: Atlas) -> list[float]:
    """The first number of every anchor."""
    return atlas.rows[0, : len(atlas), 0].tolist()


def with_scores(atlas: Atlas, *scores: float) -> Atlas:
    return Atlas(**(atlas.tree() | {"scores": torch.tensor(scores, dtype=torch.float64)}))


def test_the_anchor_of_lowest_score_is_replaced_the_first_of_equals_first() -> None:
    atlas = with_scores(atlas_of(3, [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]), 0.5, 0.1, 0.1)
    after, places = atlas.with_updates(vectors([9.0, 0.0], [8.0, 0.0]), 4)
    assert places == [1, 2]
    assert column(after) == [1.0, 9.0, 8.0]
    assert after.norms.tolist() == [1.0, 9.0, 8.0]
    assert after.born.tolist() == [0.0, 4.0, 4.0]


def test_an_anchor_that_was_not_searched_yet_stays() -> None:
    atlas = with_scores(atlas_of(2, [1.0], [2.0]), 0.3, 0.2)
    after, places = atlas.with_updates(vectors([5.0], [6.0], [7.0]), 1)
    assert places == [1, 0, -1]  # no room for the third: both places are taken by new ones
    assert column(after) == [6.0, 5.0]
    again, places = after.with_updates(vectors([8.0]), 2)
    assert places == [-1]
    assert column(again) == [6.0, 5.0]


def test_without_scores_the_oldest_is_replaced() -> None:
    atlas = with_scores(atlas_of(2, [1.0], [2.0]), 0.9, 0.1)
    atlas = Atlas(**(atlas.tree() | {"born": torch.tensor([3.0, 5.0], dtype=torch.float64)}))
    assert atlas.with_updates(vectors([7.0]), 6, by_score=False)[1] == [0]
    assert atlas.with_updates(vectors([7.0]), 6, by_score=True)[1] == [1]


def test_anchors_are_scaled_to_the_median_norm_and_a_zero_anchor_stays_zero() -> None:
    atlas = atlas_of(4, [3.0, 4.0], [0.0, 1.0], [0.0, 0.0])  # norms 5, 1, 0: the median is 1
    assert atlas.factors().tolist() == [0.2, 1.0, 0.0]
    one = torch.ones(3, dtype=torch.float64)
    x = torch.tensor([1.0, 10.0], dtype=torch.float64)
    assert atlas.combine(one * atlas.factors(), x).tolist() == pytest.approx([1.6, 11.8])
    even = atlas_of(4, [1.0], [2.0], [4.0], [10.0])  # an even number: the mean of the two in the middle, 3
    assert even.factors().tolist() == pytest.approx([3.0, 1.5, 0.75, 0.3])
    assert even.factors(normalise=False).tolist() == [1.0] * 4
    silent = atlas_of(3, [0.0], [0.0], [1.0])
    assert silent.factors().tolist() == [1.0, 1.0, 1.0]


def test_eight_bit_anchors_are_near_the_full_ones_and_take_a_quarter_of_the_room() -> None:
    torch.manual_seed(0)
    width = 17 * BLOCK + 5
    rows = [torch.randn(width) * s for s in (0.01, 1.0, 30.0)]
    device = torch.device("cpu")
    full = Atlas.empty(3, width, 32, device, torch.float32).with_updates(rows, 0)[0]
    small = Atlas.empty(3, width, 8, device, torch.float32).with_updates(rows, 0)[0]
    padded = -(-width // BLOCK) * BLOCK  # 8-bit rows end with a whole block
    assert small.rows.element_size() * small.rows.numel() == 3 * padded
    assert full.rows.element_size() * full.rows.numel() == 3 * 4 * width
    c, g = torch.tensor([1.0, -0.5, 0.02]), torch.randn(width)
    torch.testing.assert_close(small.norms, full.norms, rtol=1e-3, atol=0)
    exact, x = full.combine(c, torch.zeros(width)), torch.randn(width)
    assert float((small.combine(c, x) - x - exact).norm() / exact.norm()) < 0.01
    assert float((small.project(g) - full.project(g)).norm() / full.project(g).norm()) < 0.05


def server(model: Model, data: CentralData) -> Server:
    return Server(0, 0, model, {"centre": data}, clients={"clients": 4})


def test_the_search_finds_the_coefficients_of_a_quadratic_negative_ones_included() -> None:
    # x = 0, anchors (2, 0) and (0, 1), the optimum (3, −2): with the median norm 1.5 the anchors become (1.5, 0) and
    # (0, 1.5), so ĉ = (2, −4/3).
    model = point([0.0, 0.0])
    atlas = atlas_of(2, [2.0, 0.0], [0.0, 1.0])
    search = Search(Batching(0, steps=1500), learning_rate=0.02)
    zero = torch.zeros(2, dtype=torch.float64)
    there = server(model, central([3.0, -2.0]))
    models = Merged(model, model.initial(), atlas, atlas.factors())
    found, _ = searched(models, search, zero, there)
    assert found.tolist() == pytest.approx([2.0, -4 / 3], abs=1e-4)
    # With λ it solves (1.5² + λ)·c = 1.5·target + λ·c′: c′ = (1, 1), λ = 0.75: (4.5 + 0.75)/3 and (−3 + 0.75)/3.
    pulled = Search(Batching(0, steps=3000), learning_rate=0.02, regularisation=0.75)
    one = torch.ones(2, dtype=torch.float64)
    found, _ = searched(models, pulled, one, there)
    assert found.tolist() == pytest.approx([1.75, -0.75], abs=1e-4)


def test_a_search_may_end_quietly() -> None:
    # One anchor (1), a target so far that the gradient hardly changes: Adam's direction is −1 at both of two steps.
    # At a constant rate c goes 0.01, 0.02. Along the cosine the rates are 0.01 and 0.005. The mean of both is 0.015.
    model, zero = point([0.0]), torch.zeros(1, dtype=torch.float64)
    atlas, there = atlas_of(1, [1.0]), server(model, central([1e9]))
    models = Merged(model, model.initial(), atlas, atlas.factors())

    def ends(**options: Any) -> float:
        search = Search(Batching(0, steps=2), learning_rate=0.01, **options)
        return float(searched(models, search, zero, there)[0])

    assert ends() == pytest.approx(0.02, rel=1e-6)
    assert ends(cosine=True) == pytest.approx(0.015, rel=1e-6)
    assert ends(tail=1.0) == pytest.approx(0.015, rel=1e-6)
    assert ends(tail=0.5) == ends()  # the last half of two steps is one
    with pytest.raises(InputError, match="tail"):
        ends(tail=1.5)


@pytest.mark.parametrize("objective", ["in_domain", "out_of_domain"])
def test_the_projection_is_the_gradient_that_autograd_finds(objective: str) -> None:
    model = small_mlp(dtype=torch.float64)
    params, names = model.initial(), model.trainable
    torch.manual_seed(1)
    width = len(flat(params, names))
    empty = Atlas.empty(3, width, 32, torch.device("cpu"), torch.float64)
    atlas = empty.with_updates([torch.randn(width, dtype=torch.float64) * s for s in (0.1, 1, 5)], 0)[0]
    factors, c = atlas.factors(), torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    _, _, test = blobs()
    batch = {"x": torch.from_numpy(test.arrays["x"][:20]), "y": torch.from_numpy(test.arrays["y"][:20])}
    guide = Guide(model.loss)
    if objective == "out_of_domain":
        head = {"2.weight": torch.randn(7, 8, dtype=torch.float64), "2.bias": torch.zeros(7, dtype=torch.float64)}
        guide = Guide(surrogate(model, "out_of_domain"), head)
    found = Merged(model, params, atlas, factors).gradient(guide, c, batch)

    c.requires_grad_()
    there = unflat(flat(params, names) + (c * factors) @ atlas.rows[0], params, names)
    (expected,) = torch.autograd.grad(guide.loss(there | guide.head, batch), c)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_with_the_search_off_and_an_atlas_of_one_buffer_it_is_fedbuff() -> None:
    federated, server_data, _ = blobs()
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(3, epochs=2))
    schedule = Schedule(4, delays=HalfNormal(1.5), buffer=4)
    how = {"rounds": 8, "seed": 2, "schedule": schedule, "central": server_data}
    off = feddle(local, Search(Batching(8, steps=2), active=False), atlas=4, fallback=like_fedbuff(0.5))
    one = run(off, federated, backend=Simulator("loop", threads=1), **how)  # type: ignore[arg-type]
    two = run(fedbuff(local, server=sgd(0.5)), federated, backend=Simulator("loop", threads=1), **how)  # type: ignore[arg-type]
    for name, x in two.params.items():
        torch.testing.assert_close(one.params[name], x, rtol=1e-5, atol=1e-6)


def test_updates_without_room_still_count_as_the_fallback_says() -> None:
    """An atlas for two of four updates, the search off: still FedBuff. With the search on they move what it starts
    from: one anchor (2, 0), the update (0, 4) finds no room, and without steps to speak of x = ½·(2, 0) + ½·(0, 4)."""
    federated, server_data, _ = blobs()
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(3, epochs=2))
    how: dict[str, Any] = {"rounds": 4, "cohort": 4, "central": server_data}
    off = feddle(local, Search(Batching(8, steps=2), active=False), atlas=2)
    one = run(off, federated, backend=Simulator("loop", threads=1), **how)
    two = run(fedbuff(local, buffer=4), federated, backend=Simulator("loop", threads=1), **how)
    for name, x in two.params.items():
        torch.testing.assert_close(one.params[name], x, rtol=1e-5, atol=1e-6)

    model = point([0.0, 0.0])
    on = feddle(
        LocalTrainer(model, sgd(1.0), Batching(0, steps=1)), Search(Batching(0, steps=1), "in_domain", 0.0), atlas=1
    )
    result = run(on, targets([[2.0, 0.0]], [[0.0, 4.0]]), central=central([1.0, 1.0]), rounds=1, cohort=2)
    assert result.params["w"].tolist() == [1.0, 2.0]


FALLBACKS: dict[str, Any] = {
    "fedadam": lambda local: fedadam(local, learning_rate=0.05),
    "ca2fl": lambda local: ca2fl(local, buffer=4),
    "fedasync": fedasync,
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_any_algorithm_may_be_the_fallback(name: str, tmp_path: Path) -> None:
    """With the search off it is that algorithm, memory and all; with the search on the server's loss is lower."""
    federated, server_data, _ = blobs()
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(3, epochs=2))
    base = FALLBACKS[name](local)
    schedule = Schedule(4, delays=HalfNormal(1.5), late="use")

    def trained(algorithm: Algorithm, rounds: int = 8, **options: Any) -> Result:
        evaluate = evaluator(local.model, server_data)
        backend = Simulator("loop", threads=1)
        return run(
            algorithm, federated, rounds=rounds, seed=2, schedule=schedule, central=server_data, evaluate=evaluate,
            backend=backend, **options
        )  # fmt: skip

    def guided(active: bool = True) -> Algorithm:
        return feddle(local, Search(Batching(8, steps=5), learning_rate=0.05, active=active), atlas=6, fallback=base)

    alone, off, on = trained(base), trained(guided(active=False)), trained(guided())
    for n, x in off.params.items():  # FedAdam adds up in another order where updates come one by one
        torch.testing.assert_close(x, alone.params[n], rtol=1e-4, atol=1e-6)
    assert on.metrics["loss"] < 0.9 * alone.metrics["loss"]
    assert set(alone.state) <= set(on.state)
    trained(guided(), 4, checkpoints=Checkpoints(tmp_path))
    resumed = trained(guided(), checkpoints=Checkpoints(tmp_path), resume=True)
    assert all(torch.equal(x, on.params[n]) for n, x in resumed.params.items())


def test_the_pull_is_towards_what_the_fallback_did() -> None:
    """x' = ½(2, 0) + ½(0, 4) = (1, 2) by FedAvg's own step; a strong λ leaves it there, none lets the search go on."""
    model = point([0.0, 0.0])
    local, goal = LocalTrainer(model, sgd(1.0), Batching(0, steps=1)), central([3.0, -1.0])
    for strength, expected in ((1e6, [1.0, 2.0]), (0.0, [3.0, -1.0])):
        search = Search(Batching(0, steps=800), learning_rate=0.01, regularisation=strength)
        guided = feddle(local, search, atlas=2, fallback=fedavg(local))
        result = run(guided, targets([[2.0, 0.0]], [[0.0, 4.0]]), central=goal, rounds=1, cohort=2)
        assert result.params["w"].tolist() == pytest.approx(expected, abs=0.02)


def test_a_server_optimizer_is_not_ignored() -> None:
    """A recipe's server optimizer that is not plain SGD makes the fallback a whole algorithm."""
    federated, server_data, _ = blobs()
    model = small_mlp()
    local, centre = (LocalTrainer(model, sgd(0.1), Batching(3, steps=2)) for _ in range(2))
    how: dict[str, Any] = {"rounds": 3, "cohort": 4, "central": server_data}
    setup = Setup(local, adam(0.01), 3, centre)
    off = run(ALGORITHMS["feddle"].make(setup, search=False), federated, backend=Simulator("loop", threads=1), **how)
    base = run(fedbuff(local, buffer=0, server=adam(0.01)), federated, backend=Simulator("loop", threads=1), **how)
    assert all(torch.equal(x, base.params[n]) for n, x in off.params.items())


def test_what_cannot_be_a_fallback() -> None:
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(3, steps=1))
    search = Search(Batching(1, steps=1))
    with pytest.raises(InputError, match="one model"):
        feddle(local, search, fallback=fedadam(LocalTrainer(small_mlp(), sgd(0.1), Batching(3, steps=1))))
    with pytest.raises(InputError, match="center"):
        feddle(local, search, fallback=center(local))
    with pytest.raises(InputError, match="no part"):
        feddle(local, replace(search, fallback_start=False), fallback=fedadam(local))
    with pytest.raises(InputError, match="neither a change nor a model"):
        feddle(local, search, fallback=alone(local))
    with pytest.raises(InputError, match="one population"):
        ALGORITHMS["feddle"].make(Setup(local, sgd(1.0), 1, local), fallback="center")


def test_the_fallbacks_coefficients() -> None:
    replies = [Reply({}, 3.0, (0,), staleness=0), Reply({}, 1.0, (1,), staleness=3)]
    assert like_fedbuff(2.0)(replies) == [1.0, 0.5]
    assert like_fedavg(2.0)(replies) == [1.5, 0.5]


def test_guidance_undoes_a_client_that_leads_astray() -> None:
    """Half of the clients have wrong labels: their anchors get smaller, or negative, coefficients."""
    draw = np.random.default_rng(0)
    from mixfed.data.store import FederatedData

    y = draw.integers(0, 2, 400)
    x = (np.where(y, 2.0, -2.0)[:, None] + draw.normal(size=(400, 2))).astype(np.float32)
    owners = np.arange(400) % 10
    told = np.where(owners < 5, y, 1 - y)
    federated = FederatedData.from_arrays({"x": x, "y": told}, owners)
    torch.manual_seed(0)
    model = Model(nn.Linear(2, 2), cross_entropy)
    local = LocalTrainer(model, sgd(0.1), Batching(10, steps=4))
    guided = feddle(local, Search(Batching(20, steps=60), learning_rate=0.02), atlas=10)
    result = run(guided, federated, central=CentralData({"x": x[:60], "y": y[:60]}), rounds=1, cohort=10)
    found = result.state["searched"]["coefficients"]
    assert found[:5].min() > 0.1
    assert found[5:].max() < 0.0


def test_diagnostics_say_the_age_of_the_anchors() -> None:
    federated, server_data, _ = blobs()
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(3, steps=1))
    result = run(
        feddle(local, Search(Batching(8, steps=1)), atlas=8), federated, central=server_data, rounds=2, cohort=4
    )
    first, second = result.diagnostics
    assert (first["round"], first["anchor_age_mean"], first["anchor_age_max"]) == (1, 0.0, 0.0)
    assert second["anchor_age_mean"] == 0.5  # four of the round before, four of this one
    assert second["anchor_age_max"] == 1.0
    found = result.state["searched"]["coefficients"]
    assert len(found) == 8
    assert second["coefficient_min"] == float(found.min())
    assert second["coefficient_max"] == float(found.max())
    assert second["negative_share"] == sum(c < 0 for c in found.tolist()) / 8


def test_a_head_of_its_own_is_fitted_to_other_labels() -> None:
    _, _, test = blobs()
    other = CentralData({"x": test.arrays["x"], "y": test.arrays["y"] + 2})  # labels 2, 3, 4: five outputs
    model = small_mlp()
    assert head_of(model) == "2"
    how = Head(rate=0.1, steps=60)
    guide = how.fitted(model, "out_of_domain", model.initial(), Batching(50, steps=1), server(model, other))
    assert {n: tuple(x.shape) for n, x in guide.head.items()} == {"2.weight": (5, 8), "2.bias": (5,)}
    batch = {n: torch.from_numpy(a) for n, a in other.arrays.items()}
    assert float(guide.loss(model.initial() | guide.head, batch)) < 0.5


def test_rotation_needs_no_labels() -> None:
    draw = np.random.default_rng(0)
    images = np.zeros((30, 1, 4, 4), np.float32)
    images[:, :, 0] = draw.uniform(0.5, 1.0, (30, 1, 4))  # bright at the top
    torch.manual_seed(0)
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)), cross_entropy)
    unlabelled = server(model, CentralData({"x": images}))
    guide = Head(rate=0.1, steps=80).fitted(model, "rotation", model.initial(), Batching(30, steps=1), unlabelled)
    batch = {"x": torch.from_numpy(images), "key": torch.tensor(5)}
    assert float(guide.loss(model.initial() | guide.head, batch)) < 0.7  # chance: log 4 = 1.39


def test_what_cannot_work_is_refused_in_a_sentence() -> None:
    model = small_mlp()
    local = LocalTrainer(model, sgd(0.1), Batching(3, steps=1))
    federated, server_data, _ = blobs()
    with pytest.raises(InputError, match="head"):
        feddle(
            LocalTrainer(point([0.0]), sgd(0.1), Batching(3, steps=1)), Search(Batching(1, steps=1), "out_of_domain")
        )
    with pytest.raises(InputError, match="'atlas' of feddle must be at least 1"):
        feddle(local, Search(Batching(1, steps=1)), atlas=0)
    with pytest.raises(InputError, match="'bits' of feddle must be 8 or 32, not 4"):
        feddle(local, Search(Batching(1, steps=1)), bits=4)
    unlabelled = CentralData({"x": server_data.arrays["x"]})
    with pytest.raises(InputError, match="rotation"):
        run(feddle(local, Search(Batching(1, steps=1), "out_of_domain")), federated, central=unlabelled, rounds=1)
    with pytest.raises(InputError, match="images"):
        run(feddle(local, Search(Batching(1, steps=1), "rotation")), federated, central=unlabelled, rounds=1)
