"""Gradients of a chunk's clients under vmap are those that each client has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mixfed.core import train
from mixfed.core.train import gradient_of
from mixfed.models.attention import attend_under_vmap
from mixfed.models.vmap import over_clients

CLIENTS = 3


def loss(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """A loss that leaves the weight ``unused`` alone."""
    return (torch.tanh(batch["x"] @ params["a"]) @ params["b"]).square().mean()


def constant(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """A loss that hangs on nothing."""
    return torch.zeros(())


def attention(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """A loss with an operator that has a rule of our own under vmap."""
    x = (batch["x"] @ params["a"] + params["b"]).view(1, 2, 3, 5)
    return F.scaled_dot_product_attention(x, x, x + params["unused"].sum(), is_causal=True).square().mean()


class Squashed(torch.autograd.Function):
    """tanh as a user writes an operator, with a rule for vmap."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        return x.tanh(), in_dims[0]


def residual(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """A loss in which every weight has a part also beside the user's operator, so that none would lack its gradient."""
    x = batch["x"] @ params["a"] + params["b"] * params["unused"].sum()
    return (x + Squashed.apply(x)).square().mean()


@pytest.mark.parametrize("repeated", [train.REPEATED, 0], ids=["repeated", "by torch.func"])
@pytest.mark.parametrize("own", [["a", "b", "unused"], ["b"], []], ids=["own", "some shared", "shared"])
@pytest.mark.parametrize("judge", [loss, constant, attention, residual])
def test_of_weights_that_are_each_clients_own_or_everyones(
    judge: Any, own: list[str], repeated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend_under_vmap()
    monkeypatch.setattr(train, "REPEATED", repeated)
    torch.manual_seed(0)
    shapes = {"a": (4, 5), "b": (5,), "unused": (2,)}
    theirs = {n: torch.randn(CLIENTS, *shape) if n in own else torch.randn(shape) for n, shape in shapes.items()}
    x = torch.randn(CLIENTS, 6, 4)
    shared = {n: w for n, w in theirs.items() if n not in own}

    def one(given: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        gradient, value, _ = gradient_of(judge, {n: (given | shared)[n] for n in shapes}, {}, batch, vectorised=True)
        return gradient, value

    with torch.no_grad():
        mine = {n: theirs[n] for n in own}
        found, values = over_clients(one, CLIENTS, mine, {"x": x})
    for i in range(CLIENTS):
        alone = {n: w[i] if n in own else w for n, w in theirs.items()}
        wanted, value, _ = gradient_of(judge, alone, {}, {"x": x[i]})
        torch.testing.assert_close({n: g[i] for n, g in found.items()}, wanted)
        torch.testing.assert_close(values[i], value)
