"""Buffers: BatchNorm's statistics under the three policies, and integer buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from mixfed.algorithms.fedavg import fedadam
from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.schedule import sample_cohort
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from tests.core.helpers import assert_close, assert_equal, averaging, clients, train

SIZES = [4, 8, 12]  # whole batches of four, so that BatchNorm can also run under vmap; one, two and three steps
RAGGED = [3, 8, 6]
BATCHING = Batching(4, epochs=1, shuffle=False)
STATISTICS = ("1.running_mean", "1.running_var")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


def model(policy: str = "average") -> Model:
    return Model(network(), cross_entropy, buffers=policy)


def trained_alone(module: nn.Module, data: FederatedData, client: int) -> Params:
    """What torch makes of the module on one client's data in order."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x, y = (torch.from_numpy(data.client(client)[n]) for n in "xy")
    for start in range(0, len(x), 4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[start : start + 4]), y[start : start + 4]).backward()
        optimizer.step()
    return {n: t for n, t in module.state_dict().items() if t.is_floating_point()}


def weighted_mean(ends: list[Params], sizes: list[int]) -> Params:
    return {n: sum(s * end[n] for s, end in zip(sizes, ends, strict=True)) / sum(sizes) for n in ends[0]}


CASES = [("loop", SIZES), ("loop", RAGGED), ("vmap", SIZES)]


@pytest.mark.parametrize(("executor", "sizes"), CASES)
def test_average(executor: str, sizes: list[int]) -> None:
    data = clients(sizes)
    result = train(averaging(model(), BATCHING), data, executor, rounds=1)
    expected = weighted_mean([trained_alone(network(), data, c) for c in range(3)], sizes)
    assert_close(result.params, expected, 1e-6)
    assert result.ledger["bytes_down"] == result.ledger["bytes_up"] == 4 * 3 * (20 + 10 + 12 + 10)


@pytest.mark.parametrize(("executor", "sizes"), CASES)
def test_private(executor: str, sizes: list[int]) -> None:
    """Statistics stay on the client, go on from where they were, and neither travel nor reach the server."""
    data = clients(sizes)
    result = train(averaging(model("private"), BATCHING), data, executor, rounds=2)
    modules = [network() for _ in range(3)]
    for _ in range(2):
        ends = [trained_alone(m, data, c) for c, m in enumerate(modules)]
        common = weighted_mean(ends, sizes)
        for module, end in zip(modules, ends, strict=True):
            own = {n: end[n] if n in STATISTICS else common[n] for n in common}
            module.load_state_dict(own, strict=False)
    weights = {n: x for n, x in common.items() if n not in STATISTICS}
    assert_close({n: result.params[n] for n in weights}, weights, 1e-6)
    initial = model().initial()
    assert_equal({n: result.params[n] for n in STATISTICS}, {n: initial[n] for n in STATISTICS})
    for client, private in result.privates.items("clients"):
        assert_close(private["buffers"], {n: ends[client][n] for n in STATISTICS}, 1e-6)
    assert result.ledger["bytes_down"] == 2 * 4 * 3 * (20 + 10 + 12)


@pytest.mark.parametrize(("executor", "sizes"), CASES)
def test_server(executor: str, sizes: list[int]) -> None:
    """Statistics go down and are not sent back."""
    result = train(averaging(model("server"), BATCHING), clients(sizes), executor, rounds=2)
    initial = model().initial()
    assert_equal({n: result.params[n] for n in STATISTICS}, {n: initial[n] for n in STATISTICS})
    assert result.ledger["bytes_down"] == 2 * 4 * 3 * (20 + 10 + 12 + 10)
    assert result.ledger["bytes_up"] == 2 * 4 * 3 * (20 + 10 + 12)


def test_adaptive_servers_average_statistics_plainly() -> None:
    data = clients(SIZES)
    adam = train(fedadam(LocalTrainer(model(), sgd(0.1), BATCHING)), data, rounds=1)
    plain = train(averaging(model(), BATCHING), data, rounds=1)
    assert_close({n: adam.params[n] for n in STATISTICS}, {n: plain.params[n] for n in STATISTICS}, 1e-7)
    assert not torch.allclose(adam.params["0.weight"], plain.params["0.weight"], atol=1e-3)


class Counting(nn.Module):
    """Its answer depends on how often it was called: what must not leak from one client to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.layer(x) * self.calls


def test_integer_buffers_are_nobodys() -> None:
    torch.manual_seed(0)
    module = Counting()
    data = clients([4, 8, 5, 3])
    ends = [
        train(averaging(Model(module, cross_entropy)), data, executor, threads=threads).params
        for executor, threads in [("loop", 1), ("loop", 3), ("vmap", 1)]
    ]
    assert set(ends[0]) == {"layer.weight", "layer.bias"}
    assert_close(ends[0], ends[1], 1e-6)
    assert_close(ends[0], ends[2], 1e-6)
    assert int(module.calls) == 0


def test_batch_norm_without_momentum_is_refused() -> None:
    """Its statistics would depend on how many batches this process happens to have run."""
    with pytest.raises(InputError, match="momentum"):
        Model(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=None)), cross_entropy)


def test_padding_never_enters_batch_norm() -> None:
    data = clients(RAGGED)
    with pytest.raises(InputError, match=r"BatchNorm would take the padding .* choose loop"):
        train(averaging(model(), BATCHING), data, "vmap")
    told: list[str] = []
    auto = train(averaging(model(), BATCHING), data, "auto", say=told.append)
    assert_equal(auto.params, train(averaging(model(), BATCHING), data, "loop").params)
    assert "loop" in told[0]
    assert "BatchNorm" in told[0]


def test_padding_never_enters_batch_norm_in_a_later_round() -> None:
    """The first cohort has whole batches only; a later one does not."""
    data = clients([4] * 19 + [3])
    seed = next(s for s in range(100) if 19 not in sample_cohort(s, 0, "clients", 20, 2))
    train(averaging(model(), BATCHING), data, "vmap", rounds=1, cohort=2, seed=seed)
    with pytest.raises(InputError, match="BatchNorm"):
        train(averaging(model(), BATCHING), data, "vmap", rounds=40, cohort=2, seed=seed)
    auto = train(averaging(model(), BATCHING), data, "auto", rounds=40, cohort=2, seed=seed)
    loop = train(averaging(model(), BATCHING), data, "loop", rounds=40, cohort=2, seed=seed)
    assert_close(auto.params, loop.params, 1e-4)


def test_a_single_example_for_batch_norm_names_the_client() -> None:
    with pytest.raises(InputError, match="Client 1 of 'clients' cannot train: Expected more than 1 value per channel"):
        train(averaging(model(), BATCHING), clients([4, 5]))
