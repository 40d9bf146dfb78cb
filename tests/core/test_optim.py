"""Optimizers against PyTorch's own, and against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mixfed.core import optim, tree
from mixfed.core.optim import Optimizer
from mixfed.core.tree import Params
from mixfed.errors import InputError

Reference = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

PAIRS: dict[str, tuple[Optimizer, Reference]] = {
    "sgd": (optim.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "weight decay": (optim.sgd(0.1, weight_decay=0.3), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3)),
    "momentum": (optim.sgd(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "nesterov": (
        optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adam": (optim.adam(0.1), lambda p: torch.optim.Adam(p, 0.1)),
    "adam, other betas": (
        optim.adam(0.1, betas=(0.5, 0.9999), epsilon=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.1, betas=(0.5, 0.9999), eps=1e-3, weight_decay=0.1),
    ),
    "adam, no first moment": (
        optim.adam(0.1, betas=(0.0, 0.99)),
        lambda p: torch.optim.Adam(p, 0.1, betas=(0.0, 0.99)),
    ),
    "adagrad": (
        optim.adagrad(0.1, epsilon=1e-10, initial=0.2, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-10, initial_accumulator_value=0.2, weight_decay=0.1),
    ),
}


def random_tree(seed: int, dtype: torch.dtype) -> Params:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 2), "b": (4,), "scalar": ()}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("pair", PAIRS)
def test_as_torch(pair: str, dtype: torch.dtype, tolerance: float) -> None:
    ours, reference = PAIRS[pair]
    params = random_tree(0, dtype)
    memory = ours.init(params)
    theirs = {name: torch.nn.Parameter(x.clone()) for name, x in params.items()}
    torch_optimizer = reference(list(theirs.values()))
    for step in range(1, 7):
        gradient = random_tree(step, dtype)
        params, memory = ours.step(params, gradient, memory)
        for name, p in theirs.items():
            p.grad = gradient[name].clone()
        torch_optimizer.step()
        for name, p in theirs.items():
            assert params[name].dtype == dtype
            torch.testing.assert_close(params[name], p.detach(), rtol=tolerance, atol=tolerance)


def laid_out_otherwise(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t() if x.ndim == 2 else x


@pytest.mark.parametrize("layout", [lambda x: x, laid_out_otherwise], ids=["rows", "columns"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("pair", PAIRS)
def test_steps_that_are_written_in_place_are_the_same_steps(
    pair: str, dtype: torch.dtype, tolerance: float, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    ours, _ = PAIRS[pair]
    params = random_tree(0, dtype)
    start, memory = {n: layout(x) for n, x in params.items()}, ours.init(params)
    written, own = start, memory
    for step in range(1, 7):
        gradient = random_tree(step, dtype)
        written, own = ours.moved(written, gradient, own, ours.learning_rate, owned=step > 1, vectorised=False)
        params, memory = ours.step(params, gradient, memory)
        for name, x in params.items():
            torch.testing.assert_close(written[name], x, rtol=tolerance, atol=tolerance)
    for ours_now, theirs in zip(tree.leaves(own), tree.leaves(memory), strict=True):
        torch.testing.assert_close(ours_now, theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(start["a"], random_tree(0, dtype)["a"])  # what was not owned is as it was


def moved(optimizer: Optimizer, *gradients: float) -> list[float]:
    """Where each step takes a parameter that starts at 0."""
    params = {"x": torch.zeros(1, dtype=torch.float64)}
    memory, path = optimizer.init(params), []
    for g in gradients:
        params, memory = optimizer.step(params, {"x": torch.tensor([g], dtype=torch.float64)}, memory)
        path.append(float(params["x"]))
    return path


def test_adam_as_fedadam_publishes_it() -> None:
    """Without bias correction, β = (0.9, 0.99), ε = τ = 0.1, rate 1.

    g = 2:  m = 0.2, v = 0.04, √v = 0.2            x = −0.2/0.3 = −2/3
    g = −1: m = 0.18 − 0.1 = 0.08, v = 0.0396 + 0.01 = 0.0496, √v = 0.2227106…  x = −2/3 − 0.08/0.3227106
    """
    path = moved(optim.adam(1.0, betas=(0.9, 0.99), epsilon=0.1, bias_correction=False), 2.0, -1.0)
    assert path == pytest.approx([-2 / 3, -2 / 3 - 0.08 / (0.0496**0.5 + 0.1)], rel=1e-12)


def test_yogi() -> None:
    """β = (0.9, 0.99), ε = 0.1, rate 1; v moves by (1−β₂)·g² towards g², whatever its distance.

    g = 2:   m = 0.2,   v = 0 + 0.01·4 = 0.04          x = −0.2/(0.2 + 0.1)
    g = 0.1: m = 0.19,  v = 0.04 − 0.01·0.01 = 0.0399  (v > g²: it falls by 0.0001; Adam's would fall to 0.0397)
    """
    path = moved(optim.yogi(1.0, betas=(0.9, 0.99), epsilon=0.1), 2.0, 0.1)
    assert path == pytest.approx([-2 / 3, -2 / 3 - 0.19 / (0.0399**0.5 + 0.1)], rel=1e-12)


def test_rate_decays_once_per_round() -> None:
    optimizer = optim.sgd(0.8, decay=0.5)
    assert [optimizer.rate(t) for t in range(4)] == [0.8, 0.4, 0.2, 0.1]
    x = {"x": torch.ones(1)}
    assert float(optimizer.step(x, x, {}, round=3)[0]["x"]) == pytest.approx(0.9)


def test_rate_decays_with_the_inverse_of_the_round() -> None:
    optimizer = optim.sgd(0.6, inverse_decay=0.5)
    assert [optimizer.rate(t) for t in range(3)] == pytest.approx([0.6, 0.4, 0.3])
    assert not optimizer.is_constant
    assert optim.sgd(0.6).is_constant
    with pytest.raises(InputError, match="'inverse_decay' of sgd"):
        optim.sgd(0.6, inverse_decay=-1.0)


def test_leaves_without_a_gradient_pass_through() -> None:
    params = {"x": torch.ones(2), "statistics": torch.ones(2)}
    optimizer = optim.sgd(0.5, momentum=0.9)
    after, _ = optimizer.step(params, {"x": torch.ones(2)}, optimizer.init({"x": params["x"]}))
    assert after["statistics"] is params["statistics"]
    assert torch.equal(after["x"], torch.full((2,), 0.5))
    assert torch.equal(params["x"], torch.ones(2))


def test_only_plain_sgd_allows_recovery_of_gradients() -> None:
    assert optim.sgd(0.1, decay=0.9).is_plain_sgd
    others = [optim.sgd(0.1, momentum=0.9), optim.sgd(0.1, weight_decay=0.1), optim.adam(0.1), optim.adagrad(0.1)]
    assert not any(other.is_plain_sgd for other in others)


@pytest.mark.parametrize(
    "make", [lambda: optim.sgd(-1), lambda: optim.adam(float("nan")), lambda: optim.sgd(1, nesterov=True)]
)
def test_refusals(make: Callable[[], Optimizer]) -> None:
    with pytest.raises(InputError):
        make()


@pytest.mark.parametrize("rule", [optim.adam, optim.yogi, optim.adagrad])
def test_the_second_moment_may_start_above_zero(rule: Any) -> None:
    """Reddi et al. start at v = τ². With g = 0.3, v = 0.16: Adam and Yogi (β₁ = 0, β₂ = ½) have ½·0.16 + ½·0.09 =
    0.125 and 0.16 − 0.5·0.09 = 0.115, AdaGrad 0.16 + 0.09 = 0.25."""
    more = {} if rule is optim.adagrad else {"betas": (0.0, 0.5), "bias_correction": False}
    optimizer = rule(1.0, epsilon=1e-3, initial=0.16, **more)
    w = {"w": torch.zeros(1, dtype=torch.float64)}
    found, _ = optimizer.step(w, {"w": torch.full((1,), 0.3, dtype=torch.float64)}, optimizer.init(w))
    second = {optim.adam: 0.125, optim.yogi: 0.115, optim.adagrad: 0.25}[rule]
    assert float(found["w"]) == pytest.approx(-0.3 / (second**0.5 + 1e-3))
    with pytest.raises(InputError, match="'initial' of "):
        rule(1.0, initial=-1.0)
