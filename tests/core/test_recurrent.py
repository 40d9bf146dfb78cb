"""Recurrent layers for cohorts against PyTorch's own: the same answers and gradients, alone and under vmap."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import mixfed as mf
from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy
from mixfed.models import grouped
from mixfed.models.recurrent import for_cohorts


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """What a test sets the usual precision to holds for itself only."""
    yield
    torch.set_default_dtype(torch.float32)


LAYERS = {
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


LAYERS["lstm in 32 bits"] = LAYERS["lstm"]  # oneDNN's


def pair(layer: str = "gru", **options: Any) -> tuple[nn.RNNBase, nn.RNNBase]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if "32" in layer else torch.float64)
    own = LAYERS[layer](5, 7, **options)
    ours = for_cohorts(copy.deepcopy(own))
    assert type(ours) is not type(own)
    return own, ours


def weigh(outputs: Any) -> Tensor:
    """A number that every state has another share in."""
    states, last = outputs
    total = sum((1 + i) * x.sum() for i, x in enumerate(last if isinstance(last, tuple) else [last]))
    return (states * torch.linspace(-1, 2, states.numel(), dtype=states.dtype).view(states.shape)).sum() + total


def start_of(own: nn.RNNBase, *batch: int) -> Any:
    """A state to begin with, that a gradient can be taken by."""
    shape = (own.num_layers * (1 + own.bidirectional), *batch, 7)
    h, c = torch.randn(2, *shape).requires_grad_().unbind()
    return (h, c) if isinstance(own, nn.LSTM) else h


@settings(max_examples=40, deadline=None)
@given(
    layer=st.sampled_from(sorted(LAYERS)),
    num_layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    length=st.integers(1, 5),
    batch=st.integers(0, 3),
    started=st.booleans(),
)
def test_states_and_gradients_are_those_of_torch(
    layer: str, length: int, batch: int, started: bool, **options: Any
) -> None:
    """A batch of 0 stands for a sequence by itself."""
    own, ours = pair(layer, **options)
    sizes = (batch, length) if own.batch_first else (length, batch)
    x = torch.randn(*(sizes if batch else (length,)), 5, requires_grad=True)
    start = start_of(own, *([batch] if batch else [])) if started else None
    torch.testing.assert_close(ours(x, start), own(x, start))
    inputs = [x, *(start if isinstance(start, tuple) else [start] if started else []), *own.parameters()]
    theirs = torch.autograd.grad(weigh(own(x, start)), inputs)
    inputs[-len(list(own.parameters())) :] = ours.parameters()
    torch.testing.assert_close(torch.autograd.grad(weigh(ours(x, start)), inputs), theirs)


@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weights"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("layer", LAYERS)
def test_under_vmap_every_client_has_its_own_gradient(layer: str, bidirectional: bool, shared: bool) -> None:
    own, ours = pair(layer, batch_first=True, num_layers=2, bidirectional=bidirectional)
    start = {n: p.detach() for n, p in own.named_parameters()}
    params = start if shared else {n: torch.stack([p * (1 + c / 10) for c in range(6)]) for n, p in start.items()}
    x = torch.randn(6, 3, 4, 5)

    def loss(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return weigh(functional_call(module, params, (x,)))

    together = vmap(lambda p, x: grad(lambda p: loss(ours, p, x))(p), in_dims=(None if shared else 0, 0))(params, x)
    for c in range(6):
        alone = start if shared else {n: p[c] for n, p in params.items()}
        leaves = {n: p.clone().requires_grad_() for n, p in alone.items()}
        wanted = torch.autograd.grad(loss(own, leaves, x[c]), list(leaves.values()))
        torch.testing.assert_close([g[c] for g in together.values()], list(wanted))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("layer", ["gru", "tanh", "relu"])
def test_grouped_products_give_the_same(layer: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that cohorts of real size have in 32 bits."""
    monkeypatch.setattr(grouped, "PAYS", 0)
    own, ours = (x.float() for x in pair(layer, **options))
    start = {n: p.detach() for n, p in own.named_parameters()}
    params = {n: torch.stack([p * (1 + c / 10) for c in range(3)]) for n, p in start.items()}
    x, first = torch.randn(3, 4, 2, 5).float(), torch.randn(3, own.num_layers * (1 + own.bidirectional), 2, 7).float()

    def loss(module: nn.Module, params: dict[str, Tensor], x: Tensor, first: Tensor) -> Tensor:
        return weigh(functional_call(module, params, (x, first)))

    by = (0, 1, 2)
    together = vmap(grad(lambda *given: loss(ours, *given), by))(params, x, first)
    for c in range(3):
        wanted = grad(lambda *given: loss(own, *given), by)({n: p[c] for n, p in params.items()}, x[c], first[c])
        torch.testing.assert_close({n: g[c] for n, g in together[0].items()}, wanted[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close([g[c] for g in together[1:]], list(wanted[1:]), rtol=1e-4, atol=1e-5)


def test_shared_weights_collect_the_gradient_of_a_whole_cohort() -> None:
    own, ours = pair()
    params = {n: p.detach() for n, p in own.named_parameters()}
    x = torch.randn(6, 4, 3, 5)

    def total(params: dict[str, Tensor]) -> Tensor:
        return vmap(lambda x: weigh(functional_call(ours, params, (x,))))(x).sum()

    wanted = grad(lambda p: sum(weigh(functional_call(own, p, (one,))) for one in x))(params)
    torch.testing.assert_close(grad(total)(params), wanted)


@pytest.mark.parametrize("trained", ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"])
def test_layers_of_which_only_a_part_is_each_clients_own(trained: str) -> None:
    own, ours = pair()
    fixed = {n: p.detach() for n, p in own.named_parameters()}
    mine = torch.stack([fixed[trained] * (1 + c / 10) for c in range(3)])
    x = torch.randn(4, 3, 5)  # everyone's

    def loss(p: Tensor, module: nn.Module) -> Tensor:
        return weigh(functional_call(module, fixed | {trained: p}, (x,)))

    together = vmap(lambda p: grad(loss)(p, ours))(mine)
    torch.testing.assert_close(together, torch.stack([grad(loss)(p, own) for p in mine]))


@pytest.mark.parametrize("layer", ["gru", "lstm"])
def test_packed_sequences_are_left_to_torch(layer: str) -> None:
    own, ours = pair(layer)
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 5) for n in (4, 2)])
    torch.testing.assert_close(ours(packed)[0].data, own(packed)[0].data)


def test_projected_states_are_left_to_torch() -> None:
    own, ours = pair("lstm", proj_size=3)
    x = torch.randn(4, 2, 5)
    torch.testing.assert_close(ours(x), own(x))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_wrong_width_is_told_in_torchs_words(layer: str) -> None:
    _, ours = pair(layer)
    with pytest.raises(RuntimeError, match=r"input.size\(-1\) must be equal to input_size. Expected 5, got 4"):
        ours(torch.randn(3, 2, 4))


def test_the_gradient_cannot_be_differentiated_again() -> None:
    _, ours = pair()
    x = torch.randn(4, 3, 5, requires_grad=True)
    (first,) = torch.autograd.grad(weigh(ours(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot itself be differentiated"):
        first.sum().backward()


class Reader(nn.Module):
    """Two recurrent layers with dropout between them, over words that are given as numbers."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 5)
        self.layers = LAYERS[layer](5, 7, num_layers=2, dropout=0.4, bidirectional=True, batch_first=True)
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.words(x))[0].mean(1))


def test_dropout_that_pytorch_would_draw_is_refused() -> None:
    class Derived(nn.LSTM):
        """Another class, which is left to PyTorch."""

    model = mf.Model(Derived(5, 7, num_layers=2, dropout=0.4, batch_first=True), cross_entropy)
    with pytest.raises(mf.InputError, match="Dropout between recurrent layers cannot be drawn"):
        model.outputs(model.initial(), {"x": torch.randn(2, 3, 5), "key": torch.tensor(1)}, training=True)


@pytest.mark.parametrize("layer", ["gru", "lstm", "tanh"])
def test_executors_agree_on_ragged_clients_with_dropout_between_layers(layer: str) -> None:
    draw = np.random.default_rng(0)
    fields = {"x": draw.integers(0, 9, (21, 6)), "y": draw.integers(0, 3, 21)}
    data = mf.FederatedData(fields, np.array([0, 4, 5, 12, 21]))
    torch.manual_seed(0)
    model = mf.Model(Reader(layer), cross_entropy)
    trainer = mf.LocalTrainer(model, mf.sgd(0.5), Batching(4, epochs=2))

    def after(executor: str, chunk: int | None = None) -> dict[str, Tensor]:
        simulator = mf.Simulator(executor, chunk=chunk)
        return mf.run(mf.fedavg(trainer), data, rounds=2, cohort=4, backend=simulator, seed=3).params

    wanted, start = after("loop"), model.initial()
    assert all(not torch.equal(wanted[n], start[n]) for n in start)
    for chunk in (None, 3):
        torch.testing.assert_close(after("vmap", chunk), wanted, rtol=1e-4, atol=1e-6)
