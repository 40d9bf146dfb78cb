"""Random numbers in a forward pass: the same for loop and vmap and for any state of the global generators."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.data.batch import Batch
from mixfed.errors import InputError
from mixfed.models.draws import KeyedDraws
from tests.core.helpers import assert_close, assert_equal, averaging, clients, train

DATA = clients([3, 9, 5, 4, 7], (6,))
Noise = Callable[[Tensor], Tensor]


class Noisy(nn.Module):
    """A linear layer whose inputs are disturbed while training."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.noise, self.layer = noise, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.noise(x) if self.training else x)


def noisy(noise: Noise) -> Model:
    torch.manual_seed(0)
    return Model(Noisy(noise), cross_entropy)


DRAWN: dict[str, Noise] = {
    "rand": lambda x: x + torch.rand(len(x), 6),
    "rand of a scalar": lambda x: x * torch.rand(()),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "randn_like": lambda x: x + 0.5 * torch.randn_like(x),
    "randint": lambda x: x + torch.randint(3, (len(x), 6)) + torch.randint(-2, 2, size=(6,)),
    "randint_like": lambda x: x + torch.randint_like(x, 3) + torch.randint_like(x, 1, 5),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "bernoulli of p": lambda x: x * x.bernoulli(0.7),
    "normal": lambda x: torch.normal(x, 0.3) + torch.normal(0.0, 1.0, (6,)) + torch.normal(0.0, x.abs()),
    "drop path": lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.7) / 0.7,
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "normal_": lambda x: x + torch.empty_like(x).normal_(0, 0.5),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(2.0),
    "two in turn": lambda x: F.dropout(x + torch.randn_like(x)) - torch.randn_like(x),
}


@pytest.mark.parametrize("name", DRAWN)
def test_loop_and_vmap_agree_whatever_the_global_generator(name: str) -> None:
    reference = train(averaging(noisy(DRAWN[name])), DATA, "loop").params
    model = noisy(DRAWN[name])
    torch.manual_seed(123)
    assert_equal(train(averaging(model), DATA, "loop").params, reference)
    for options in ({"chunk": 2}, {"chunk": 9, "threads": 2}):
        assert_close(train(averaging(noisy(DRAWN[name])), DATA, "vmap", **options).params, reference, 2e-6)
    plain = train(averaging(noisy(lambda x: x)), DATA, "loop").params
    assert not any(torch.allclose(x, plain[n]) for n, x in reference.items())


class TimeFirst(nn.Module):
    """A network with its examples in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = F.dropout(x.T[..., None], 0.5, self.training)
        return self.layer(steps + 0.1 * torch.randn_like(steps)).mean(0)


def test_padding_changes_nothing_where_examples_are_not_the_first_dimension() -> None:
    torch.manual_seed(0)
    model = Model(TimeFirst(), cross_entropy)
    loop, vmap = (train(averaging(model), DATA, executor).params for executor in ("loop", "vmap"))
    assert_close(vmap, loop, 2e-6)


REFUSED: dict[str, tuple[Noise, str]] = {
    "randperm": (lambda x: x[torch.randperm(len(x))], "torch.randperm"),
    "multinomial": (lambda x: x * torch.multinomial(torch.ones(6), 6), "torch.multinomial"),
    "poisson": (lambda x: x + torch.poisson(x.abs()), "torch.poisson"),
    "random_": (lambda x: x + torch.empty_like(x).random_(0, 5), "random_"),
    "cauchy_": (lambda x: x + torch.empty_like(x).cauchy_(), "cauchy_"),
    "gumbel": (lambda x: x * F.gumbel_softmax(x), "gumbel_softmax"),
    "init": (lambda x: x + nn.init.normal_(torch.empty_like(x)), "normal_"),
}


@pytest.mark.parametrize("executor", ["loop", "vmap", "auto"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_is_refused_by_name(name: str, executor: str) -> None:
    noise, told = REFUSED[name]
    with pytest.raises(InputError, match=rf"calls .*{told} in its forward pass, .* draw with torch.rand"):
        train(averaging(noisy(noise)), DATA, executor)


@pytest.mark.parametrize("executor", ["loop", "auto"])
def test_rrelu_is_refused(executor: str) -> None:
    """vmap has a sentence of its own."""
    with pytest.raises(InputError, match=r"calls .*rrelu in its forward pass"):
        train(averaging(noisy(lambda x: F.rrelu(x, training=True))), DATA, executor)


def test_a_generator_of_the_networks_own_is_refused() -> None:
    own = torch.Generator()
    with pytest.raises(InputError, match=r"torch.rand draws per client without 'generator' and 'out'"):
        train(averaging(noisy(lambda x: x + torch.rand(6, generator=own))), DATA)


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_other_generators_are_refused(draw: Callable[[], float]) -> None:
    with pytest.raises(InputError, match="Python's or NumPy's random numbers in its forward pass"):
        train(averaging(noisy(lambda x: x + draw())), DATA)


def test_a_tensor_of_everyones_cannot_be_filled_under_vmap() -> None:
    noise: Noise = lambda x: x + torch.empty(6).normal_()  # noqa: E731
    with pytest.raises(InputError, match="normal_ fills a tensor that all clients share"):
        train(averaging(noisy(noise)), DATA, "vmap")
    reference = train(averaging(noisy(noise)), DATA, "loop").params
    assert_equal(train(averaging(noisy(noise)), DATA, "auto").params, reference)


def test_a_criterion_may_draw() -> None:
    def criterion(outputs: Tensor, batch: Batch) -> Tensor:
        return cross_entropy(outputs + torch.randn_like(outputs), batch)

    def run(executor: str, seed: int) -> Any:
        torch.manual_seed(0)
        model = Model(nn.Linear(6, 2), criterion)
        torch.manual_seed(seed)
        return train(averaging(model), DATA, executor).params

    assert_equal(run("loop", 1), run("loop", 2))
    assert_close(run("loop", 1), run("vmap", 2), 2e-6)


def test_a_network_that_draws_nothing_is_left_alone_after_its_first_pass() -> None:
    modes: list[int] = []

    def forward(module: nn.Module, batch: Batch) -> Tensor:
        modes.append(torch._C._len_torch_function_stack())
        return module(batch["x"])

    model = Model(nn.Linear(6, 2), cross_entropy, forward=forward)
    batch = {"x": torch.randn(4, 6), "y": torch.tensor([0, 1, 0, 1]), "key": torch.tensor(1)}
    for _ in range(3):
        model.loss(model.initial(), batch)
    assert modes == [1, 0, 0]


def test_evaluation_draws_as_the_module_does() -> None:
    model = Model(nn.Linear(6, 2), cross_entropy, forward=lambda m, b: m(b["x"]) + torch.randn(2))
    torch.manual_seed(7)
    noise = torch.randn(2)
    torch.manual_seed(7)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    outputs = model.outputs(model.initial(), {"x": x, "key": torch.tensor(1)}, training=False)
    torch.testing.assert_close(outputs, model.module()(x).detach() + noise)


N = 40_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_moments(dtype: torch.dtype) -> None:
    """Mean and variance of 40,000 numbers within five standard errors, and the ends of uniform numbers."""
    like = torch.zeros(N, dtype=dtype)
    with KeyedDraws(torch.tensor(3)):
        drawn = {
            "uniform": (torch.rand_like(like), 0.5, 1 / 12),
            "normal": (torch.normal(1.0, 2.0, (N,), dtype=dtype), 1.0, 4.0),
            "randn": (torch.randn(N, dtype=dtype), 0.0, 1.0),
            "uniform_": (like.clone().uniform_(2, to=5), 3.5, 9 / 12),
            "exponential_": (like.clone().exponential_(2.0), 0.5, 0.25),
            "bernoulli": (torch.bernoulli(like + 0.25), 0.25, 0.1875),
            "randint": (torch.randint(2, 12, (N,), dtype=dtype), 6.5, 99 / 12),
        }
    for name, (x, mean, variance) in drawn.items():
        assert x.dtype == dtype
        error = 5 * math.sqrt(variance / N) + (0.004 if dtype == torch.bfloat16 else 0)
        assert float(x.double().mean()) == pytest.approx(mean, abs=error), name
        assert float(x.double().var()) == pytest.approx(variance, rel=0.08), name
    assert 0 <= float(drawn["uniform"][0].min()) < float(drawn["uniform"][0].max()) < 1
    assert sorted(set(drawn["randint"][0].tolist())) == list(range(2, 12))
    pairs = torch.stack([drawn["uniform"][0].double(), drawn["randn"][0].double()])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / math.sqrt(N)


def test_torch_normal_passes_no_gradient_on() -> None:
    mean = torch.zeros(5, requires_grad=True)
    with KeyedDraws(torch.tensor(3)):
        assert not torch.normal(mean, 1.0).requires_grad


@pytest.mark.parametrize("layer", [nn.Embedding(5, 2, max_norm=1.0), nn.EmbeddingBag(5, 2, max_norm=1.0)])
def test_an_embedding_that_changes_its_table_is_refused(layer: nn.Module) -> None:
    with pytest.raises(InputError, match="leave max_norm out"):
        Model(nn.Sequential(layer, nn.Flatten()), cross_entropy)


def test_such_a_lookup_as_a_function_is_refused() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(10 * torch.ones(5, 2))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x.long().clamp(0, 4)[:, 0], self.table, max_norm=1.0)

    with pytest.raises(InputError, match="leave max_norm out"):
        train(averaging(Model(Lookup(), cross_entropy)), DATA)
