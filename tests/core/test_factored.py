"""Factored clients end where clients with weights of their own end, and no wide weight of theirs is ever formed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mixfed.backends.simulator.factored import InFactors
from mixfed.backends.simulator.factored.factors import Factors, Pairs
from mixfed.backends.simulator.factored.matrix import Factored
from mixfed.core.batches import Batches, Batching, plan_cohort
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import Optimizer, adam, sgd
from mixfed.core.train import LocalTrainer, Proximal
from mixfed.data.batch import Batch
from mixfed.data.store import FederatedData
from tests.core.helpers import clients

RAGGED = [9, 4, 12, 3]
WIDE = 110


def layers(*parts: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*parts)


class Twice(nn.Module):
    """A layer that is used twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.layer(self.layer(x).relu()))
        return found


class Positions(nn.Module):
    """A layer for each position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.layer(x).tanh().mean(1))
        return found


class Elsewhere(nn.Module):
    """The first weight is also used in a product of its own, the second without a gradient, the third in F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDE, WIDE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x) @ self.one.weight
        x = self.two(x) * self.two.weight.detach().std()
        found: Tensor = self.three(x)
        return found


class Text(nn.Module):
    """A table, a GRU, and a wide layer over its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gru = nn.Embedding(5, 6), nn.GRU(6, WIDE, batch_first=True)
        self.last = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.gru(self.table(x))[0][:, -1])
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "several layers, the last too narrow": (
        layers(nn.Linear(70, 90), nn.ReLU(inplace=True), nn.Linear(90, 80), nn.Tanh(), nn.Linear(80, 2)),
        (70,),
        {"0.weight", "2.weight"},
    ),
    "no bias": (
        layers(nn.Linear(70, 90, bias=False), nn.ReLU(inplace=True), nn.Linear(90, 80, bias=False)),
        (70,),
        {"0.weight", "2.weight"},
    ),
    "flattened": (
        layers(nn.Flatten(), nn.Sequential(nn.Linear(70, 90), nn.Sigmoid()), nn.Linear(90, 80), nn.ReLU()),
        (7, 10),
        {"1.0.weight", "2.weight"},
    ),
    "dropout": (
        layers(nn.Dropout(0.3), nn.Linear(70, 90), nn.Dropout(0.5), nn.Linear(90, 80)),
        (70,),
        {"1.weight", "3.weight"},
    ),
    "norm": (layers(nn.Linear(70, 90), nn.LayerNorm(90), nn.ReLU(), nn.Linear(90, 2)), (70,), {"0.weight"}),
    "convolution": (
        layers(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 2)),
        (1, 6, 6),
        {"3.weight"},
    ),
    "twice": (Twice, (WIDE,), {"layer.weight"}),
    "positions": (Positions, (2, WIDE), {"layer.weight"}),
    "too many positions": (Positions, (9, WIDE), set()),
    "elsewhere": (Elsewhere, (WIDE,), {"three.weight"}),
}
OPTIMIZERS = {
    "sgd": sgd(0.1),
    "decay": sgd(0.1, weight_decay=0.05),
    "momentum": sgd(0.1, momentum=0.9),
    "nesterov": sgd(0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
}


def trained(
    make: Callable[[], nn.Module],
    data: FederatedData,
    *,
    optimizer: Optimizer | None = None,
    batching: Batching | None = None,
    dtype: torch.dtype = torch.float64,
    corrected: bool = False,
    mu: float = 0.0,
    **options: Any,
) -> tuple[set[str], dict[str, Any], dict[str, Any]]:
    """Which weights stayed in factors, where the clients of a chunk ended, and where each ended alone."""
    torch.manual_seed(0)
    model = Model(make(), cross_entropy, dtype=dtype)
    trainer = LocalTrainer(model, optimizer or sgd(0.1), batching or Batching(4, epochs=2), **options)
    plan = plan_cohort("clients", data, np.arange(len(data)), trainer.batching, 0, 0)
    params = {n: p.to(dtype) for n, p in model.initial().items()}
    correction = {n: 0.1 * torch.randn_like(params[n]) for n in model.trainable} if corrected else None
    loss = Proximal(model.loss, model.trained(params), mu) if mu else None
    kept: set[str] = set()

    def one(batches: Batches) -> dict[str, Any]:
        end = trainer.train(params, batches, correction=correction, loss=loss, want_gradient=True)
        delta = {n: x - params[n] for n, x in end.params.items()}
        kept.update(n for n, x in delta.items() if isinstance(x, Factored))
        found = {"delta": delta, "gradient": end.gradient_sum or {}}
        return {k: {n: _dense(x) for n, x in leaves.items()} for k, leaves in found.items()} | {"loss": end.loss}

    batches = plan.chunk(slice(0, len(plan)))
    several = {"fields": batches.fields, "key": batches.key, "steps": batches.steps, "examples": batches.examples}
    several |= {n: x for n, x in [("mask", batches.mask), ("active", batches.active)] if x is not None}
    with torch.no_grad():
        together = torch.vmap(lambda given: one(replace(batches, kernel=InFactors(), **given)))(several)
        alone = [one(plan.client(i)) for i in range(len(plan))]
    stacked = {
        k: {n: torch.stack([a[k][n] for a in alone]) for n in alone[0][k]}
        if k != "loss"
        else torch.stack([a[k] for a in alone])
        for k in alone[0]
    }
    return kept, together, stacked


def _dense(x: Tensor) -> Tensor:
    return x.dense() if isinstance(x, Factored) else x


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-10) -> None:
    for part, leaves in wanted.items():
        torch.testing.assert_close(
            found[part], leaves, rtol=tolerance, atol=tolerance, msg=lambda m, p=part: f"{p}: {m}"
        )


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_chunk_ends_where_its_clients_end_alone(name: str, corrected: bool) -> None:
    make, shape, factors = MODELS[name]
    kept, found, wanted = trained(make, clients(RAGGED, shape), corrected=corrected)
    assert kept == factors
    assert_same(found, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_in_single_precision(name: str) -> None:
    make, shape, factors = MODELS[name]
    kept, found, wanted = trained(make, clients(RAGGED, shape), dtype=torch.float32)
    assert kept == factors
    assert_same(found, wanted, 1e-5)


def test_text() -> None:
    draw = np.random.default_rng(0)
    data = FederatedData.from_datasets(
        [{"x": draw.integers(0, 5, (n, 4)), "y": draw.integers(0, 5, n)} for n in RAGGED]
    )
    kept, found, wanted = trained(Text, data)
    assert kept == {"last.weight"}
    assert_same(found, wanted)


def test_statistics_of_batches() -> None:
    make = layers(nn.Linear(70, 90), nn.BatchNorm1d(90), nn.ReLU(), nn.Linear(90, 2))
    kept, found, wanted = trained(make, clients([8, 4, 12], (70,)))
    assert kept == {"0.weight"}
    assert_same(found, wanted)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_linear_optimizers_and_a_proximal_term(rule: str, mu: float, corrected: bool) -> None:
    make, shape, factors = MODELS["several layers, the last too narrow"]
    kept, found, wanted = trained(make, clients(RAGGED, shape), optimizer=OPTIMIZERS[rule], mu=mu, corrected=corrected)
    assert kept == factors
    assert ("0.weight" in wanted["gradient"]) == (rule != "sgd")
    assert_same(found, wanted)


@pytest.mark.parametrize("name", ["several layers, the last too narrow", "twice"])
def test_clipped_gradients(name: str) -> None:
    make, shape, factors = MODELS[name]
    kept, found, wanted = trained(make, clients(RAGGED, shape), clip=0.3, corrected=True)
    assert kept == factors
    assert_same(found, wanted)
    assert (trained(make, clients(RAGGED, shape), corrected=True)[1]["loss"] - found["loss"]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "options",
    [{"optimizer": adam(0.01)}, {"clip": 0.3, "mu": 0.5}, {"batching": Batching(4, steps=20)}],
    ids=["adam", "clip and pull", "too many steps"],
)
def test_what_cannot_be_factored_runs_as_before(options: dict[str, Any]) -> None:
    make, shape, _ = MODELS["several layers, the last too narrow"]
    kept, found, wanted = trained(make, clients(RAGGED, shape), **options)
    assert kept == set()
    assert_same(found, wanted)


@pytest.mark.parametrize(("dtype", "possible"), [(torch.float32, True), (torch.bfloat16, False)])
def test_rounding_at_every_step_needs_weights_of_ones_own(dtype: torch.dtype, possible: bool) -> None:
    model = Model(nn.Linear(WIDE, WIDE), cross_entropy, dtype=dtype)
    trainer = LocalTrainer(model, sgd(0.1), Batching(4, steps=1))
    params = {n: p.to(dtype) for n, p in model.initial().items()}
    batches = plan_cohort("clients", clients([4], (WIDE,)), np.arange(1), trainer.batching, 0, 0).chunk(slice(0, 1))
    found = []

    def one(key: Tensor, fields: Batch) -> Tensor:
        found.append(InFactors().train(trainer, params, replace(batches, key=key, fields=fields), 0, None, None))
        return key

    torch.vmap(one)(batches.key, batches.fields)
    assert [x is not None for x in found] == [possible]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    batch=st.integers(0, 4),
    steps=st.integers(1, 9),
    widths=st.lists(st.integers(1, 120), min_size=2, max_size=4),
    rule=st.sampled_from(sorted(OPTIMIZERS)),
    corrected=st.booleans(),
    positions=st.integers(0, 2),
)
def test_any_shape(
    sizes: list[int], batch: int, steps: int, widths: list[int], rule: str, corrected: bool, positions: int
) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, [*widths[1:], 2], strict=True))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x.mean(1) if positions else x

    shape = (positions, widths[0]) if positions else (widths[0],)
    kept, found, wanted = trained(
        Network,
        clients(sizes, shape),
        optimizer=OPTIMIZERS[rule],
        batching=Batching(batch, steps=steps),
        corrected=corrected,
    )
    rank = steps * (min(batch, max(sizes)) or max(sizes)) * max(positions, 1)
    sizes_of = zip(widths, [*widths[1:], 2], strict=True)
    assert kept == {f"layers.{i}.weight" for i, (a, b) in enumerate(sizes_of) if rank * (a + b) < a * b}
    assert_same(found, wanted)


def some_factors() -> Factors:
    torch.manual_seed(0)
    shared = (torch.randn(6, 7, dtype=torch.float64), torch.randn(6, 7, dtype=torch.float64))
    blocks = [(torch.randn(3, r, 7, dtype=torch.float64), torch.randn(3, r, 6, dtype=torch.float64)) for r in (2, 1)]
    share, coefficients = (torch.randn(3, n, dtype=torch.float64).numpy() for n in (2, 3))
    return Factors(shared, share, tuple(Pairs(*block) for block in blocks), coefficients)


def test_sums_and_products_of_factors_are_those_of_the_matrices() -> None:
    factors, weights, matrix = some_factors(), torch.tensor([1.0, 2.0, 0.5]), torch.randn(6, 7, dtype=torch.float64)
    dense = factors.dense()
    inputs, gradients = (torch.cat(blocks, 1) for blocks in zip(*factors.pairs, strict=True))
    by_hand = torch.einsum("cs,soi->coi", torch.from_numpy(factors.share), torch.stack(factors.shared))
    by_hand = by_hand + torch.einsum("cr,cri,cro->coi", torch.from_numpy(factors.coefficients), inputs, gradients)
    torch.testing.assert_close(dense, by_hand)
    torch.testing.assert_close(factors.weighted_sum(weights), torch.einsum("c,coi->oi", weights.double(), dense))
    torch.testing.assert_close(factors.inner(matrix), (dense * matrix).sum((1, 2)))
    torch.testing.assert_close(factors.squares(), dense.square().sum((1, 2)))


def stands_for(factors: Factors, function: Callable[[Factored, Tensor], Tensor]) -> tuple[list[bool], Tensor]:
    """What the function makes of each client's matrix and number, and whether it stayed in factors."""
    in_factors = []

    def one(number: Tensor) -> Tensor:
        found = function(Factored(factors), number)
        in_factors.append(isinstance(found, Factored) and found.factors is not None)
        return _dense(found)

    return in_factors, torch.vmap(one)(torch.arange(1.0, 4.0, dtype=torch.float64))


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x, shared: w - shared,
        lambda w, x, shared: torch.add(w, shared, alpha=0.5),
        lambda w, x, shared: x * (-w / 2),
        lambda w, x, shared: (w - shared).detach().clone() * x,
        lambda w, x, shared: w.to(torch.float64),
    ],
)
def test_what_is_linear_leaves_a_matrix_in_factors(function: Callable[..., Tensor]) -> None:
    factors = some_factors()
    numbers = torch.arange(1.0, 4.0, dtype=torch.float64)
    stayed, found = stands_for(factors, lambda w, x: function(w, x, factors.shared[0]))
    assert stayed == [True]
    wanted = torch.stack([function(w, x, factors.shared[0]) for w, x in zip(factors.dense(), numbers, strict=True)])
    torch.testing.assert_close(found, wanted)


def test_the_norm_of_a_matrix_in_factors_forms_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = some_factors()
    wanted = torch.linalg.vector_norm(factors.dense().flatten(1), dim=1)
    monkeypatch.setattr(Factors, "dense", lambda self: pytest.fail("the matrix was formed"))
    found = torch.vmap(lambda number: torch.linalg.vector_norm(number * Factored(factors)))(torch.ones(3))
    torch.testing.assert_close(found, wanted)


def _written(w: Tensor, x: Tensor) -> Tensor:
    w = w.clone()
    w.mul_(2.0)
    return w + x


@pytest.mark.parametrize(
    "function", [lambda w, x: w * w, lambda w, x: torch.stack([w, w]).sum(0) * x, lambda w, x: w.T.relu(), _written]
)
def test_anything_else_is_done_to_the_matrix_itself(function: Callable[..., Tensor]) -> None:
    factors = some_factors()
    stayed, found = stands_for(factors, function)
    assert stayed == [False]
    numbers = torch.arange(1.0, 4.0, dtype=torch.float64)
    torch.testing.assert_close(
        found, torch.stack([function(w, x) for w, x in zip(factors.dense(), numbers, strict=True)])
    )
