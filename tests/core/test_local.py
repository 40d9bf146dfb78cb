"""The kernel that clients and centre share: clipping, corrections, sums of gradients, ragged steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixfed.core import optim, tree
from mixfed.core.batches import Batches, Batching, Plan, plan_cohort
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import Optimizer, sgd
from mixfed.core.train import LocalTrainer, Trained, clipped, gradient_of
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.models import vmap
from tests.core.helpers import assert_close, clients
from tests.problems import point, small_mlp, targets, trainer

RAGGED = clients([2, 9, 5], (2,), 3)


def batches_of(data: FederatedData, batching: Batching, client: int = 0) -> Batches:
    return plan_cohort("clients", data, np.arange(len(data)), batching, 0, 0).client(client)


def test_clipping() -> None:
    """‖(3, 4)‖ = 5: clipped to 1 it is (0.6, 0.8); below the bound nothing changes."""
    g = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}
    assert_close(clipped(g, 1.0), {"a": torch.tensor([0.6]), "b": torch.tensor([[0.8]])})
    assert_close(clipped(g, 5.5), g, 0)
    assert_close(clipped(tree.zeros(g), 1.0), tree.zeros(g), 0)


def test_clipping_bounds_every_step() -> None:
    """From 0 towards (30, 40) with rate 1 and clip 1: two steps of length 1."""
    model = point([0.0, 0.0])
    local = LocalTrainer(model, sgd(1.0), Batching(0, steps=2), clip=1.0)
    end = local.train(model.initial(), batches_of(targets([[30.0, 40.0]]), local.batching)).params
    torch.testing.assert_close(end["w"], torch.tensor([1.2, 1.6], dtype=torch.float64))
    with pytest.raises(InputError):
        LocalTrainer(model, sgd(1.0), Batching(0, steps=2), clip=0.0)


def test_a_correction_joins_every_step_after_clipping() -> None:
    """Clipped gradient −1 plus correction ½: −½ a step, so two steps of rate 1 end at 1."""
    model = point([0.0])
    local = LocalTrainer(model, sgd(1.0), Batching(0, steps=2), clip=1.0)
    correction = {"w": torch.tensor([0.5], dtype=torch.float64)}
    trained = local.train(model.initial(), batches_of(targets([[50.0]]), local.batching), correction=correction)
    assert float(trained.params["w"]) == pytest.approx(1.0)


def test_loss_is_the_mean_over_steps() -> None:
    """½·4² = 8 at w = 0 and ½·2² = 2 at w = 2: mean 5."""
    local = trainer(point([0.0]), 0.5, steps=2)
    trained = local.train(local.model.initial(), batches_of(targets([[4.0]]), local.batching))
    assert float(trained.loss) == pytest.approx(5.0)
    assert int(trained.steps) == 2


def test_the_rate_of_the_round() -> None:
    local = trainer(point([0.0]), 0.5, optimizer=sgd(0.5, decay=0.5))
    ends = [local.train(local.model.initial(), batches_of(targets([[4.0]]), local.batching), t).params for t in (0, 2)]
    assert [float(end["w"]) for end in ends] == pytest.approx([2.0, 0.5])


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_sum_of_gradients(clip: float | None) -> None:
    """Σₖ gₖ as a second computation sees it: the same steps taken one by one."""
    model, batching = small_mlp(), Batching(2, epochs=2)
    local = LocalTrainer(model, sgd(0.1, momentum=0.9), batching, clip)
    correction = tree.scale(model.initial(), 0.1)
    batches = batches_of(RAGGED, batching, 1)
    trained = local.train(model.initial(), batches, correction=correction, want_gradient=True)
    weights, memory, total = model.initial(), local.optimizer.init(model.initial()), tree.zeros(model.initial())
    for batch, _ in batches:
        g = gradient_of(model.loss, weights, {}, batch)[0]
        g = clipped(g, clip) if clip else g
        total = tree.add(total, g)
        weights, memory = local.optimizer.step(weights, tree.add(g, correction), memory)
    assert_close(trained.gradient_sum, total, 1e-6)
    assert_close(trained.params, weights, 1e-6)


def test_plain_sgd_needs_no_sum_of_gradients() -> None:
    local = LocalTrainer(small_mlp(), sgd(0.1), Batching(2, steps=3))
    batches = batches_of(RAGGED, local.batching)
    assert local.train(local.model.initial(), batches, want_gradient=True).gradient_sum is None


def test_tape_and_functional_gradients_agree() -> None:
    model = small_mlp()
    batch = next(iter(batches_of(RAGGED, Batching(4, steps=1), 1)))[0]
    tape, functional = (gradient_of(model.loss, model.initial(), {}, batch, vectorised=v) for v in (False, True))
    assert_close(tape[0], functional[0], 1e-6)
    torch.testing.assert_close(tape[1], functional[1])


@pytest.mark.parametrize("owned", [True, False])
def test_gradients_of_many_clients_are_those_of_each(owned: bool) -> None:
    """Weights of each client's own are differentiated outside of vmap, and everyone's inside. One leaf has no part in
    the loss, and a loss that depends on nothing has gradient zero."""
    torch.manual_seed(0)
    weights = {"a": torch.randn(3, 4), "b": torch.randn(3, 4), "unused": torch.randn(3, 2)}
    x = torch.randn(3, 5, 4)

    def loss(params: Params, batch: Batch) -> Tensor:
        return (batch["x"] * params["a"].sin()).sum() * params["b"].exp().sum()

    def one(given: dict[str, Any]) -> tuple[Params, Tensor, Params, Tensor]:
        own = given["weights"] if owned else {n: w[0] for n, w in weights.items()}
        found = gradient_of(loss, own, {}, {"x": given["x"]}, vectorised=True)
        nothing = gradient_of(lambda params, batch: torch.zeros(()), own, {}, {"x": given["x"]}, vectorised=True)
        return *found[:2], *nothing[:2]

    gradients, values, zeros, nothing = vmap.over_clients(one, 3, {"weights": weights, "x": x})
    for i in range(3):
        own = {n: w[i if owned else 0] for n, w in weights.items()}
        wanted, value, _ = gradient_of(loss, own, {}, {"x": x[i]})
        assert_close({n: g[i] for n, g in gradients.items()}, wanted, 1e-6)
        torch.testing.assert_close(values[i], value)
        assert not any(g[i].any() for g in zeros.values())
    assert nothing.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("vectorised", [False, True])
def test_a_parameter_without_a_part_in_the_loss_has_gradient_zero(vectorised: bool) -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 3), "idle": nn.Linear(2, 3)})
    model = Model(module, cross_entropy, forward=lambda m, batch: m["used"](batch["x"]))
    batch = next(iter(batches_of(RAGGED, Batching(2, steps=1))))[0]
    gradient = gradient_of(model.loss, model.initial(), {}, batch, vectorised)[0]
    assert not gradient["idle.weight"].any()
    assert gradient["used.weight"].any()


OPTIMIZERS = {
    "momentum": optim.sgd(0.1, momentum=0.9),
    "adam": optim.adam(0.05),
    "yogi": optim.yogi(0.05),
    "adagrad": optim.adagrad(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_a_client_does_not_have_move_nothing(name: str) -> None:
    """Under vmap the client with one step waits while another takes five: its end is the one it has alone."""
    model, batching = small_mlp(), Batching(2, epochs=1)
    local = LocalTrainer(model, OPTIMIZERS[name], batching)
    plan = plan_cohort("clients", RAGGED, np.arange(3), batching, 0, 0)
    together = vmapped(local, plan)
    for i in range(3):
        alone = local.train(model.initial(), plan.client(i), want_gradient=True)
        assert_close({n: x[i] for n, x in together.params.items()}, alone.params, 2e-6)
        assert_close({n: x[i] for n, x in together.gradient_sum.items()}, alone.gradient_sum, 2e-6)
        torch.testing.assert_close(together.loss[i], alone.loss)


def vmapped(local: LocalTrainer, plan: Plan) -> Trained:
    batches = plan.chunk(slice(0, 3))
    given = {n: getattr(batches, n) for n in ("fields", "key", "steps", "examples", "mask", "active")}

    def one(given: dict) -> tuple:
        t = local.train(local.model.initial(), replace(batches, **given), want_gradient=True)
        return t.params, t.loss, t.steps, t.gradient_sum

    return Trained(*torch.vmap(one)(given))


def test_the_start_is_left_alone() -> None:
    local: LocalTrainer = LocalTrainer(small_mlp(), sgd(0.5), Batching(2, epochs=3))
    start = local.model.initial()
    local.train(start, batches_of(RAGGED, local.batching, 1))
    assert_close(start, local.model.initial(), 0)


def test_an_optimizer_is_a_value() -> None:
    """The same trainer may serve any number of clients: training twice gives the same."""
    local = LocalTrainer(small_mlp(), optim.adam(0.1), Batching(2, epochs=3))
    ends = [local.train(local.model.initial(), batches_of(RAGGED, local.batching, 1)).params for _ in range(2)]
    assert isinstance(local.optimizer, Optimizer)
    assert_close(*ends, 0)
