"""Training on lookups is training on the whole table, however the model looks things up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.mixed import Centre, Population, gradient_1way
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batches
from mixfed.core.loop import Result
from mixfed.core.losses import hinge
from mixfed.core.model import Model
from mixfed.core.optim import Optimizer, adam
from mixfed.core.regularisers import spreadout
from mixfed.data.batch import Batch
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.models.bags import bag
from mixfed.models.recommender import DualEncoder
from mixfed.transforms.rows.exchange import exchange_rows
from mixfed.transforms.rows.lookups import Lookups, train_on_lookups
from tests.movies.problem import ITEMS, TABLE, WIDTH, clients, examples, on_clients, regulariser


def test_a_step_by_hand() -> None:
    """T = (1, 2, 3), loss = mean of T[id]²/2 over the ids 0, 2, 2, rate 0.3, correction (1, 1, 1).

    The gradients at the places are T[id]/3, so T − 0.3·((1/3, 0, 1 + 1) + (1, 1, 1)) = (0.6, 1.7, 2.1).
    """
    batch = {"x": torch.tensor([[0, 2, 2]])}
    one = torch.ones(())
    batches = Batches(
        "clients", batch, torch.zeros((), dtype=torch.int64), one, one * 3, (3,), kernel=Lookups({"T": ("x",)})
    )
    parts = {"tables": {"T": torch.tensor([[1.0], [2.0], [3.0]])}, "weights": {}, "buffers": {}}
    parts["correction"] = {"T": torch.ones(3, 1)}
    end, loss = train_on_lookups(lambda p, b: F.embedding(b["x"], p["T"]).square().mean() / 2, parts, batches, 0.3)
    torch.testing.assert_close(end["T"], torch.tensor([[0.6], [1.7], [2.1]]))
    torch.testing.assert_close(loss, torch.tensor((1 + 9 + 9) / 6))
    assert parts["tables"]["T"].tolist() == [[1], [2], [3]]


def test_a_step_on_bags_by_hand() -> None:
    """T = (1, 2, 3), bags (0, 2, 2) and (1, padding, padding): sums s = 7 and 2, loss = mean of s²/2, rate 0.2.

    The gradient of a bag is s/2 = 3.5 and 1, and each of its places has it, so that T becomes
    T − 0.2·(3.5, 1, 3.5 + 3.5) = (0.3, 1.8, 1.6).
    """
    batch = {"x": torch.tensor([[[0, 2, 2], [1, -1, -1]]])}
    one = torch.ones(())
    batches = Batches(
        "clients", batch, torch.zeros((), dtype=torch.int64), one, one * 2, (2,), kernel=Lookups({"T": ("x",)})
    )
    parts = {"tables": {"T": torch.tensor([[1.0], [2.0], [3.0]])}, "weights": {}, "buffers": {}, "correction": {}}
    end, loss = train_on_lookups(lambda p, b: bag(b["x"], p["T"]).square().mean() / 2, parts, batches, 0.2)
    torch.testing.assert_close(end["T"], torch.tensor([[0.3], [1.8], [1.6]]))
    torch.testing.assert_close(loss, torch.tensor((49 + 4) / 4))


def test_a_bag_is_the_sum_of_its_rows_without_padding() -> None:
    table = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    ids = torch.tensor([[0, 1, 1], [1, -1, -1], [-1, -1, -1]])
    expected = torch.tensor([[5.0, 50.0], [2.0, 20.0], [0.0, 0.0]])
    torch.testing.assert_close(bag(ids, table), expected)
    torch.testing.assert_close(torch.vmap(bag)(ids[None], table[None])[0], expected)


class InBags(DualEncoder):
    """Bags with padding, bags of one without any, and bags of a table that is not exchanged."""

    def __init__(self) -> None:
        super().__init__(ITEMS, WIDTH)
        self.kinds = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        items = bag(seen, self.embedding.weight) + bag((seen >= 0).long(), self.kinds)
        return (self.hidden(items) * bag(following[..., None], self.embedding.weight)).sum(-1)


class Indexed(DualEncoder):
    """Looks the following item up by an index, which is no call of F.embedding."""

    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        bag = (self.embedding(seen.clamp(min=0)) * (seen >= 0)[..., None]).sum(-2)
        return (self.hidden(bag) * self.embedding.weight[following]).sum(-1)


class ByFrequency(DualEncoder):
    """Divides a row's gradient by how often a batch has it, so that its lookup is no plain one."""

    def __init__(self) -> None:
        super().__init__(ITEMS, WIDTH)
        self.embedding.scale_grad_by_freq = True


class Normalised(DualEncoder):
    """Has buffers of running statistics, and dropout."""

    def __init__(self) -> None:
        super().__init__(ITEMS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        bag = (self.embedding(seen.clamp(min=0)) * (seen >= 0)[..., None]).sum(-2)
        return (self.dropout(self.norm(self.hidden(bag))) * self.embedding(following)).sum(-1)


def made(module: Callable[[], nn.Module], *, transfer: bool, optimizer: Optimizer | None = None) -> Algorithm:
    torch.manual_seed(0)
    one = Model(module(), hinge, dtype=torch.float64)
    if not transfer:
        return fedavg(on_clients(one, optimizer))
    return gradient_1way(Population(on_clients(one)), Centre(regulariser(one), needs_data=False))


def train(algorithm: Algorithm, executor: str, data: FederatedData) -> Result:
    return run(algorithm, data, rounds=3, cohort=4, backend=Simulator(executor, threads=1, chunk=3))


def even() -> FederatedData:
    """Batches without padding, which BatchNorm needs under vmap."""
    draw = np.random.default_rng(0)
    return FederatedData.from_datasets([examples(6, draw) for _ in range(5)])


@pytest.mark.parametrize("transfer", [False, True], ids=["fedavg", "gradient transfer"])
@pytest.mark.parametrize(
    ("module", "data", "executor"),
    [
        (InBags, clients, "loop"),
        (InBags, clients, "vmap"),
        (lambda: Indexed(ITEMS, WIDTH), clients, "loop"),
        (lambda: Indexed(ITEMS, WIDTH), clients, "vmap"),
        (ByFrequency, clients, "loop"),
        (Normalised, even, "loop"),
        (Normalised, even, "vmap"),
    ],
)
def test_every_use_of_a_table_is_trained(
    module: Callable[[], nn.Module], data: Callable[[], FederatedData], executor: str, transfer: bool
) -> None:
    full = train(made(module, transfer=transfer), "loop", data())
    rows = train(exchange_rows(made(module, transfer=transfer)), executor, data())
    for name, x in full.params.items():
        torch.testing.assert_close(x, rows.params[name], rtol=1e-9, atol=1e-11)


class Unmasked(DualEncoder):
    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        return self.embedding(seen).sum((-1, -2)) + self.embedding(following).sum(-1)


class Constant(DualEncoder):
    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        return (self.embedding(following) * self.embedding(torch.zeros((), dtype=torch.int64))).sum(-1)


class Next(DualEncoder):
    """Looks up the item after the one that followed."""

    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        return (self.embedding(following) * self.embedding((following + 1) % len(self.embedding.weight))).sum(-1)


class Last(DualEncoder):
    """Looks up ids of -1 by an index, which finds the last row of a table."""

    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        return (self.embedding.weight[seen].sum(-2) * self.embedding(following)).sum(-1)


class Whole(DualEncoder):
    """Has a regulariser over the whole table in its scores."""

    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        return super().forward(seen, following) - 0.01 * spreadout(self.embedding.weight)


class Elsewhere(DualEncoder):
    """Looks the same ids up in a table that is not declared."""

    def __init__(self) -> None:
        super().__init__(ITEMS, WIDTH)
        self.kinds = nn.Embedding(ITEMS, WIDTH)

    def forward(self, seen: Tensor, following: Tensor) -> Tensor:
        return super().forward(seen, following) + self.kinds(following).sum(-1)


class Padded(DualEncoder):
    def __init__(self) -> None:
        super().__init__(ITEMS, WIDTH)
        self.embedding = nn.Embedding(ITEMS, WIDTH, padding_idx=0)


def padded_later() -> FederatedData:
    """Only the last client's examples have padding."""
    data = even()
    data.arrays["x"][:-6] = data.arrays["x"][:-6].clip(min=0)
    return data


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("optimizer", [None, adam(0.02)], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    "module",
    [
        *(lambda: Unmasked(ITEMS, WIDTH), lambda: Constant(ITEMS, WIDTH), lambda: Next(ITEMS, WIDTH)),
        *(lambda: Last(ITEMS, WIDTH), lambda: Whole(ITEMS, WIDTH), Elsewhere),
    ],
    ids=["unmasked", "constant", "next", "last", "whole", "elsewhere"],
)
def test_lookups_that_cannot_be_right_are_refused(
    module: Callable[[], nn.Module], executor: str, optimizer: Optimizer | None
) -> None:
    told = "ids that its examples name|looks up row -1 of the table 'embedding.weight'"
    with pytest.raises(InputError, match=told):
        train(exchange_rows(made(module, transfer=False, optimizer=optimizer)), executor, padded_later())


def test_a_table_with_a_padding_idx_is_refused() -> None:
    with pytest.raises(InputError, match="has a padding_idx"):
        exchange_rows(made(Padded, transfer=False))


@pytest.mark.parametrize("optimizer", [None, adam(0.02)], ids=["sgd", "adam"])
@pytest.mark.parametrize("label", [-1, 3])
def test_a_client_never_finds_the_rows_of_another(label: int, optimizer: Optimizer | None) -> None:
    """Three clients with the rows of two movies; the middle one's label is as if it had another, before or after.

    The labels are no field that was made to fit the rows, so they are looked at.
    """
    torch.manual_seed(0)
    one = Model(DualEncoder(ITEMS, WIDTH), hinge)
    trainer = on_clients(one, optimizer)
    fields = {"x": torch.tensor([0, 1]).expand(3, 1, 3, 2), "y": torch.tensor([1]).expand(3, 1, 3).clone()}
    fields["y"][1, 0, 2] = label
    count, weights = torch.tensor([2, 2, 4]), one.initial() | {TABLE: torch.randn(3, 4, WIDTH)}

    def trained(fields: Batch, count: Tensor, table: Tensor) -> Tensor:
        batches = Batches(
            "clients", fields, torch.zeros((), dtype=torch.int64), torch.ones(()), torch.ones(()),
            vectorised=True, kernel=Lookups({TABLE: ("x",)}), extra={TABLE: count},
        )  # fmt: skip
        return trainer.train(weights | {TABLE: table}, batches).params[TABLE]

    with pytest.raises(InputError, match=f"looks up row {label} of the table '{TABLE}', of which .* 0 to 1;"):
        torch.vmap(trained)(fields, count, weights[TABLE])
    fields["y"][1, 0, 2] = 0
    assert torch.vmap(trained)(fields, count, weights[TABLE]).isfinite().all()
