"""The GRU for cohorts against PyTorch's own: the same answers and gradients, alone and under vmap."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from mixfed.models.recurrent import GRU, for_cohorts

KINDS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two layers": {"num_layers": 2},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "without bias": {"bias": False},
}


def pair(**options: object) -> tuple[nn.GRU, nn.GRU]:
    torch.manual_seed(0)
    own = nn.GRU(5, 7, **options).double()  # type: ignore[call-overload]
    ours = for_cohorts(copy.deepcopy(own))
    assert isinstance(ours, GRU)
    return own, ours


def weigh(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """A number that every state has another share in."""
    states, last = outputs
    return (states * torch.linspace(-1, 2, states.numel(), dtype=states.dtype).view(states.shape)).sum() + last.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_are_those_of_torch(kind: str) -> None:
    own, ours = pair(**KINDS[kind])
    x = torch.randn(4, 3, 5, dtype=torch.double, requires_grad=True)
    batch = 4 if own.batch_first else 3
    h = torch.randn(own.num_layers * (1 + own.bidirectional), batch, 7, dtype=torch.double, requires_grad=True)
    for start in (None, h):
        torch.testing.assert_close(ours(x, start), own(x, start))
        inputs = [x] if start is None else [x, h]
        theirs, mine = (torch.autograd.grad(weigh(m(x, start)), [*inputs, *m.parameters()]) for m in (own, ours))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weights"])
def test_under_vmap_every_client_has_its_own_gradient(shared: bool) -> None:
    own, ours = pair(batch_first=True)
    start = {n: p.detach() for n, p in own.named_parameters()}
    params = start if shared else {n: torch.stack([p * (1 + c / 10) for c in range(6)]) for n, p in start.items()}
    x = torch.randn(6, 3, 4, 5, dtype=torch.double)

    def loss(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return weigh(functional_call(module, params, (x,)))

    together = vmap(lambda p, x: grad(lambda p: loss(ours, p, x))(p), in_dims=(None if shared else 0, 0))(params, x)
    for c in range(6):
        alone = start if shared else {n: p[c] for n, p in params.items()}
        wanted = grad(lambda p, c=c: loss(own, p, x[c]))(alone)
        torch.testing.assert_close({n: g[c] for n, g in together.items()}, wanted)


def test_shared_weights_collect_the_gradient_of_a_whole_cohort() -> None:
    own, ours = pair()
    params = {n: p.detach() for n, p in own.named_parameters()}
    x = torch.randn(6, 4, 3, 5, dtype=torch.double)

    def total(params: dict[str, Tensor]) -> Tensor:
        return vmap(lambda x: weigh(functional_call(ours, params, (x,))))(x).sum()

    wanted = grad(lambda p: sum(weigh(functional_call(own, p, (one,))) for one in x))(params)
    torch.testing.assert_close(grad(total)(params), wanted)


def test_packed_sequences_and_dropout_between_layers_are_left_to_torch() -> None:
    own, ours = pair()
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 5, dtype=torch.double) for n in (4, 2)])
    torch.testing.assert_close(ours(packed)[0].data, own(packed)[0].data)
    own, ours = pair(num_layers=2, dropout=0.5)
    x = torch.randn(4, 3, 5, dtype=torch.double)
    torch.manual_seed(1)
    wanted = own(x)
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x), wanted)


def test_the_gradient_cannot_be_differentiated_again() -> None:
    _, ours = pair()
    x = torch.randn(4, 3, 5, dtype=torch.double, requires_grad=True)
    (first,) = torch.autograd.grad(weigh(ours(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot itself be differentiated"):
        first.sum().backward()
