"""Cross-entropy under vmap: the losses and gradients of single clients, whatever the order in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from mixfed.models import entropy
from mixfed.models.entropy import judge_under_vmap

judge_under_vmap()
CLIENTS, BATCH, CLASSES = 3, 4, 5
POSITIONS = {"a class": (), "a class at every position": (6,), "a class at every place": (2, 3)}
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "classes second": lambda x: x,
    "classes last": lambda x: x.movedim(2, -1).contiguous().movedim(-1, 2),
    "classes last, clients late": lambda x: (
        x.transpose(0, 1).movedim(2, -1).contiguous().movedim(-1, 2).transpose(0, 1)
    ),
}


def losses(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y, reduction="none")


def examples(positions: str, order: str = "classes second") -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(CLIENTS, BATCH, CLASSES, *POSITIONS[positions])
    y = torch.randint(CLASSES, (CLIENTS, BATCH, *POSITIONS[positions]))
    y[0, 0] = -100  # which PyTorch leaves out
    return ORDERS[order](x), y


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_losses_and_gradients_are_those_of_single_clients(positions: str, order: str) -> None:
    x, y = examples(positions, order)
    x = x.detach().requires_grad_()
    wanted = torch.stack([losses(x[c], y[c]) for c in range(CLIENTS)])
    slope = torch.autograd.grad(wanted.square().sum(), x)[0]
    found = vmap(losses)(x, y)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), x)[0], slope)
    inside = vmap(grad(lambda x, y: losses(x, y).square().sum()))(x.detach(), y)
    torch.testing.assert_close(inside, slope)


@pytest.mark.parametrize("own", [(0, None), (None, 0)], ids=["everyone's labels", "everyone's answers"])
def test_what_is_everyones(own: tuple[int | None, int | None]) -> None:
    x, y = examples("a class at every position")
    found = vmap(losses, own)(*(t if dim == 0 else t[1] for t, dim in zip((x, y), own, strict=True)))
    wanted = [losses(x[1 if own[0] is None else c], y[1 if own[1] is None else c]) for c in range(CLIENTS)]
    torch.testing.assert_close(found, torch.stack(wanted))


def test_clients_of_clients() -> None:
    x, y = examples("a class at every position")
    found = vmap(vmap(losses, (0, None)), (None, 0))(x, y)
    wanted = torch.stack([torch.stack([losses(x[i], y[j]) for i in range(CLIENTS)]) for j in range(CLIENTS)])
    torch.testing.assert_close(found, wanted)


OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "weights": lambda x, y: F.cross_entropy(x, y, weight=torch.arange(1.0, 1 + CLASSES), reduction="none"),
    "smooth labels": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="none"),
    "probabilities": lambda x, y: F.cross_entropy(x, x.softmax(1), reduction="none"),
    "a single example": lambda x, y: F.cross_entropy(x[1], y[1], reduction="none"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_the_rest_is_pytorchs(kind: str) -> None:
    x, y = examples("a class")
    torch.testing.assert_close(
        vmap(OTHERS[kind])(x, y), torch.stack([OTHERS[kind](x[c], y[c]) for c in range(CLIENTS)])
    )


def test_labels_in_another_shape_are_refused() -> None:
    x, y = examples("a class at every position")
    with pytest.raises((RuntimeError, ValueError)):
        vmap(losses)(x, y.transpose(1, 2))


def test_the_rule_is_told_once_and_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_under_vmap()
    assert len(entropy._registered) == 1
    x, y = examples("a class")
    monkeypatch.setattr(entropy, "_losses", lambda x, y, ignored: y.float())
    assert torch.equal(vmap(losses)(x, y), y.float())
