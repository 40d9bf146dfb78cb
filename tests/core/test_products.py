"""Products by oneDNN: PyTorch's numbers, alone, differentiated and under vmap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mixfed.core.ledger import count_work
from mixfed.models.products import LARGE, ONEDNN, are_large, linear, linears

CLIENTS, ROWS, IN, OUT = 3, 100, 256, 160
assert 2 * ROWS * IN * OUT >= LARGE


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_large_and_small_products_are_pytorchs() -> None:
    weight, bias = torch.randn(OUT, IN), torch.randn(OUT)
    for x in (torch.randn(ROWS, IN), torch.randn(4, ROWS, IN), torch.randn(2, IN), torch.randn(IN)):
        close(linear(x, weight, bias), F.linear(x, weight, bias))
        close(linear(x, weight), F.linear(x, weight))


def test_strides_do_not_matter() -> None:
    wide, tall = torch.randn(ROWS, 2 * IN), torch.randn(IN, OUT)
    for x in (wide[:, IN:], torch.randn(IN, ROWS).mT, wide[:, :1].expand(ROWS, IN)):
        for weight in (tall.mT, torch.randn(2 * OUT, IN)[::2], tall[:, :1].mT.expand(OUT, IN)):
            close(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_left_to_pytorch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(ROWS, IN, dtype=dtype), torch.randn(OUT, IN, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def gradients(function: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in given]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    return *first, *torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves)


def test_gradients_and_their_gradients() -> None:
    given = torch.randn(ROWS, IN) / 16, torch.randn(OUT, IN) / 16, torch.randn(OUT)
    for found, wanted in zip(gradients(linear, *given), gradients(F.linear, *given), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("own", [(0, 0, 0), (0, None, None), (0, None, 0), (None, 0, 0), (0, 0, None), (1, 2, 1)])
def test_clients_have_their_own_under_vmap(own: tuple[int | None, ...]) -> None:
    shapes = [[ROWS, IN], [OUT, IN], [OUT]]
    for shape, place in zip(shapes, own, strict=True):
        if place is not None:
            shape.insert(place, CLIENTS)
    given = [torch.randn(shape) / 16 for shape in shapes]

    def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given: function(*given).square().sum()

    for wrapped in (lambda f: f, lambda f: torch.func.grad(loss(f), argnums=(0, 1, 2))):
        found, wanted = (torch.vmap(wrapped(f), own)(*given) for f in (linear, F.linear))
        for ours, theirs in zip(found, wanted, strict=True):
            close(ours, theirs)


def test_torch_func_alone_and_what_is_everyones_under_vmap() -> None:
    x, weight, clients = torch.randn(ROWS, IN) / 16, torch.randn(OUT, IN) / 16, torch.randn(CLIENTS)
    found, wanted = (torch.func.grad(lambda w, f=f: f(x, w).square().sum())(weight) for f in (linear, F.linear))
    close(found, wanted)
    found, wanted = (torch.vmap(lambda c, f=f: c * f(x, weight))(clients) for f in (linear, F.linear))
    close(found, wanted)


def test_clients_of_clients() -> None:
    x, weight = torch.randn(2, CLIENTS, ROWS, IN), torch.randn(2, CLIENTS, OUT, IN)
    found, wanted = (torch.vmap(torch.vmap(f))(x, weight) for f in (linear, F.linear))
    close(found, wanted)


def test_products_of_many_clients() -> None:
    bias = torch.randn(CLIENTS, OUT)
    for rows, outputs in ((ROWS, OUT), (2, OUT), (ROWS, 1)):
        x, weight = torch.randn(CLIENTS, rows, IN), torch.randn(CLIENTS, outputs, IN)
        assert not (ONEDNN and rows == ROWS and outputs == OUT) or are_large(x, weight)
        close(linears(x, weight), torch.bmm(x, weight.mT))
        close(linears(x, weight, bias[:, :outputs]), torch.bmm(x, weight.mT) + bias[:, None, :outputs])


def test_the_ledger_counts_them() -> None:
    x, weight = torch.randn(ROWS, IN), torch.randn(OUT, IN)
    assert count_work(lambda: linear(x, weight)) == (2 * ROWS * IN * OUT, 1)
    assert count_work(lambda: gradients(linear, x, weight)) == count_work(lambda: gradients(F.linear, x, weight))
