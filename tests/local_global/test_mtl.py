"""Mean-regularised multi-task learning against the formula and by hand."""

from __future__ import annotations

import pytest
import torch

from mixfed.algorithms.mtl import mean_regularised, mtl
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.schedule import Joining, Schedule
from mixfed.errors import InputError
from tests.problems import point, targets, trainer


def test_gradient_is_that_of_the_formula() -> None:
    """∂/∂w_m of λ₁·tr(WΩWᵀ) + λ₂·‖W‖²_F with Ω = (I − 11ᵀ/M)², all of W free, by autograd."""
    torch.manual_seed(0)
    devices, lambda1, lambda2 = 5, 0.3, 0.7
    w = torch.randn(4, devices, dtype=torch.float64, requires_grad=True)
    centred = torch.eye(devices, dtype=torch.float64) - torch.full((devices, devices), 1 / devices, dtype=torch.float64)
    omega = centred @ centred
    (lambda1 * torch.trace(w @ omega @ w.T) + lambda2 * w.square().sum()).backward()
    mean = {"w": w.detach().mean(1)}
    for m in range(devices):
        own = w.detach()[:, m].clone().requires_grad_()
        loss = mean_regularised(lambda params, batch: params["w"].sum() * 0, mean, lambda1, lambda2)
        loss({"w": own}, {}).backward()
        torch.testing.assert_close(own.grad, w.grad[:, m])  # type: ignore[index]


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_rounds_by_hand(executor: str) -> None:
    # w starts at 0; A has target 2 and B target 4; rate 0.1, λ₁ = 0.5, λ₂ = 0.25; three clients, C at 0 stays there.
    # Gradients: (w − a) + 2·0.5·(w − w̄) + 2·0.25·w.  Round 1 (w̄ = 0): A = 0.2, B = 0.4, C = 0; w̄ = 0.6/3 = 0.2.
    # Round 2. A: (0.2 − 2) + (0.2 − 0.2) + 0.1 = −1.7, A = 0.37.  B: (0.4 − 4) + 0.2 + 0.2 = −3.2, B = 0.72.
    # C: 0 + (0 − 0.2) + 0 = −0.2, C = 0.02.  w̄ = 0.2 + (0.17 + 0.32 + 0.02)/3 = 0.37 = (0.37 + 0.72 + 0.02)/3.
    data = targets([[2.0]], [[4.0]], [[0.0]])
    algorithm = mtl(trainer(point([0.0]), 0.1), lambda1=0.5, lambda2=0.25)
    first, second = (run(algorithm, data, rounds=r, cohort=3, backend=Simulator(executor)) for r in (1, 2))
    own = [[float(p["params"]["w"]) for _, p in r.privates.items("clients")] for r in (first, second)]  # type: ignore[union-attr]
    assert own == [pytest.approx([0.2, 0.4, 0.0]), pytest.approx([0.37, 0.72, 0.02])]
    assert float(first.params["w"]) == pytest.approx(0.2)
    assert float(second.params["w"]) == pytest.approx(0.37)


def test_the_server_keeps_the_mean_over_all_clients() -> None:
    """Also where only some are asked: those not yet asked are at the common start."""
    data = targets(*[[[float(i)]] for i in range(7)])
    result = run(mtl(trainer(point([1.0]), 0.1), lambda1=0.2), data, rounds=3, cohort=2, backend=Simulator("loop"))
    own = {c: float(p["params"]["w"]) for c, p in result.privates.items("clients")}  # type: ignore[union-attr]
    mean = sum(own.get(c, 1.0) for c in range(7)) / 7
    assert float(result.params["w"]) == pytest.approx(mean)


def test_the_mean_is_kept_while_a_device_settles() -> None:
    """Only what stays on a device may be learnt without the server; the mean of all models has to follow them."""
    data = targets(*[[[float(i)]] for i in range(5)])
    schedule = Schedule(2, joining=Joining(1, 0.5, settle=2))
    result = run(mtl(trainer(point([1.0]), 0.1), lambda1=0.2), data, rounds=3, schedule=schedule)
    own = {c: float(p["params"]["w"]) for c, p in result.privates.items("clients")}  # type: ignore[union-attr]
    assert float(result.params["w"]) == pytest.approx(sum(own.get(c, 1.0) for c in range(5)) / 5)


def test_negative_weights_are_refused() -> None:
    with pytest.raises(InputError, match="'lambda1' of mtl must be at least 0"):
        mtl(trainer(point([0.0]), 0.1), lambda1=-1.0)
