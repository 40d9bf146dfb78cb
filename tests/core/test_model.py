"""Any torch module: what of it trains and travels, in which precision, and that the user's own is left alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.data.batch import Batch
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.models.networks import CharacterGRU, cnn
from tests.core.helpers import assert_close, assert_equal, averaging, clients, train
from tests.problems import Point, half_square, small_mlp, targets


class Tied(nn.Module):
    """Encoder and decoder share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.normal, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.normal(x + self.attention(x, x, x)[0]).mean(1))


def text(n: int = 6) -> FederatedData:
    draw = np.random.default_rng(0)
    return FederatedData.from_datasets([{"x": draw.integers(0, 5, (n, 4)), "y": draw.integers(0, 5, (n, 4))}])


MODULES: dict[str, tuple[Callable[[], nn.Module], FederatedData]] = {
    "tied": (Tied, clients([6], (3,), 3)),
    "gru": (lambda: CharacterGRU(5, 4, 6), text()),
    "cnn": (lambda: cnn(1, 8, 2, (3, 4), 5), clients([6], (1, 8, 8))),
    "attention": (Attention, clients([6], (3, 4))),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)),
        clients([6]),
    ),
    "nested": (lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.PReLU()), nn.Linear(4, 2)), clients([6])),
}


@pytest.mark.parametrize("name", MODULES)
def test_one_step_is_torchs_own(name: str) -> None:
    """One client, one full-batch step: what torch.optim.SGD does to the module itself. And the module is untouched."""
    torch.manual_seed(1)
    make, data = MODULES[name]
    module = make()
    before = {n: x.clone() for n, x in module.state_dict().items()}
    model = Model(module, cross_entropy)
    result = train(averaging(model, Batching(0, steps=1), sgd(0.5)), data, rounds=1)
    assert_equal(dict(module.state_dict()), before)
    assert module.training
    assert all(p.requires_grad and p.grad is None for p in module.parameters())

    x, y = (torch.from_numpy(data.arrays[n]) for n in "xy")
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    cross_entropy(module(x), {"y": y}).mean().backward()
    optimizer.step()
    assert_close(result.params, {n: p.detach() for n, p in module.named_parameters()}, 1e-5)


def test_a_module_in_evaluation_mode_stays_so() -> None:
    module = nn.Sequential(nn.Linear(3, 2)).eval()
    module[0].weight.requires_grad_(False)
    train(averaging(Model(module, cross_entropy)), clients([4, 4]))
    assert not module.training
    assert not module[0].weight.requires_grad


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_frozen_parameters_neither_change_nor_travel(executor: str) -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    model = Model(module, cross_entropy, trainable=lambda name: name.startswith("2."))
    result = train(averaging(model), clients([4, 6, 3]), executor, rounds=2)
    assert set(result.params) == {"2.weight", "2.bias"}
    assert result.ledger["bytes_down"] == result.ledger["bytes_up"] == 4 * (10 + 2) * 3 * 2
    assert not torch.equal(result.params["2.weight"], module[2].weight)
    x = torch.randn(4, 3)
    outputs = model.outputs(result.params, {"x": x}, training=False)
    features = module[1](module[0](x))
    expected = nn.functional.linear(features, result.params["2.weight"], result.params["2.bias"])
    torch.testing.assert_close(outputs, expected.detach())


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(InputError, match="No parameter of the module is trainable"):
        Model(nn.Linear(2, 2), cross_entropy, trainable=lambda name: False)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_bfloat16_travels_and_the_server_keeps_float32(executor: str) -> None:
    data = clients([4, 6, 3], (2,), 3)
    half, whole = (train(averaging(small_mlp(dtype=d)), data, executor) for d in (torch.bfloat16, torch.float32))
    assert_equal(small_mlp(dtype=torch.bfloat16).initial(), small_mlp().initial())
    assert {x.dtype for x in half.params.values()} == {torch.float32}
    assert 2 * half.ledger["bytes_down"] == whole.ledger["bytes_down"]
    assert 2 * half.ledger["bytes_up"] == whole.ledger["bytes_up"]
    moved = {n: x - small_mlp().initial()[n] for n, x in whole.params.items()}
    assert_close(half.params, whole.params, 0.15 * max(float(x.abs().max()) for x in moved.values()))
    # The average is taken in 32 bits: it need not be a number that 16 bits can hold.
    assert any(not torch.equal(x, x.bfloat16().float()) for x in half.params.values())


@pytest.mark.parametrize(("executor", "chunk"), [("loop", None), ("vmap", 3)])
def test_bfloat16_updates_are_summed_in_float32(executor: str, chunk: int | None) -> None:
    """300 clients move w from 0 to 1; a sum in 16 bits would stay at 256, where 256 + 1 = 256."""
    model = Model(Point([0.0]), half_square, dtype=torch.bfloat16)
    result = train(
        averaging(model, Batching(0, steps=1), sgd(1.0)), targets(*[[[1.0]]] * 300), executor, 1, chunk=chunk
    )
    assert float(result.params["w"]) == pytest.approx(1.0, abs=1e-6)


def test_float64() -> None:
    data = clients([4, 6, 3], (2,), 3)
    double, single = (train(averaging(small_mlp(dtype=d)), data) for d in (torch.float64, torch.float32))
    assert {x.dtype for x in double.params.values()} == {torch.float64}
    assert_close({n: x.float() for n, x in double.params.items()}, single.params, 1e-6)
    assert any(not torch.equal(x, x.float().double()) for x in double.params.values())


def test_unknown_precision_and_policy_are_refused() -> None:
    with pytest.raises(InputError, match="float16"):
        small_mlp(dtype=torch.float16)
    with pytest.raises(InputError, match="buffer policy is 'keep'"):
        small_mlp(buffers="keep")


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_criterion_gives_one_loss_per_example(executor: str) -> None:
    def mean_at_once(outputs: Tensor, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["y"])

    with pytest.raises(InputError, match="one loss per example"):
        train(averaging(Model(nn.Linear(3, 2), mean_at_once)), clients([4, 4]), executor)


def test_forward_says_how_the_module_is_called() -> None:
    module = nn.Bilinear(3, 3, 2)
    model = Model(module, cross_entropy, forward=lambda m, batch: m(batch["x"], batch["x"] + 1))
    x = torch.randn(2, 3)
    torch.testing.assert_close(model.outputs(model.initial(), {"x": x}, training=False), module(x, x + 1).detach())


def test_threads_do_not_interfere() -> None:
    """Many threads, each with parameters of its own, all through one model."""
    model, x = small_mlp(), torch.randn(5, 2)
    own = [{n: p + i for n, p in model.initial().items()} for i in range(8)]
    expected = [model.outputs(p, {"x": x}, training=True) for p in own]

    def work(i: int) -> bool:
        return all(torch.equal(model.outputs(own[i], {"x": x}, training=True), expected[i]) for _ in range(100))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_parameters_of_a_client_do_not_linger() -> None:
    model, x = small_mlp(), torch.randn(5, 2)
    other = {n: p + 1 for n, p in model.initial().items()}
    before = model.outputs(model.initial(), {"x": x}, training=False)
    model.outputs(other, {"x": x}, training=False)
    assert torch.equal(model.outputs({}, {"x": x}, training=False), before)


def test_a_layer_without_width_is_refused() -> None:
    with pytest.raises(InputError, match=r"'1.weight' has the shape \[0, 3\]"):
        Model(nn.Sequential(nn.Flatten(), nn.Linear(3, 0), nn.Linear(0, 2)), cross_entropy)
