"""Row exchange gives what full tables give, and counts what it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch

from mixfed import optim
from mixfed.algorithms.baselines import local_only
from mixfed.algorithms.fedavg import fedadam, fedavg, fedavgm, fedprox
from mixfed.algorithms.mixed import Centre, Population, gradient_1way, gradient_2way, parallel
from mixfed.algorithms.rows import exchange_rows
from mixfed.backends.simulator import Simulator
from mixfed.core import Algorithm
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.model import Batch, Model
from mixfed.models.recommender import DualEncoder
from mixfed.recommend import hinge
from mixfed.run import Result, run
from mixfed.transforms import compress, quantize
from tests.movies.problem import HISTORY, ITEMS, TABLE, WIDTH, centre, clients, model, on_clients, regulariser
from tests.problems import small_mlp

Make = Callable[[], Algorithm]


def mixed(make: Callable[..., Algorithm], optimizer: optim.Optimizer | None = None, **options: object) -> Make:
    def made() -> Algorithm:
        one = model()
        return make(
            Population(on_clients(one, optimizer), 0.5), Centre(regulariser(one), 0.5, needs_data=False), **options
        )

    return made


ALGORITHMS: dict[str, Make] = {
    "fedavg": lambda: fedavg(on_clients(model())),
    "fedavg, epochs": lambda: fedavg(on_clients(model(), epochs=2)),
    "fedavg, server rate": lambda: fedavg(on_clients(model()), server=optim.sgd(0.7)),
    "fedavg, clipped": lambda: fedavg(on_clients(model(), clip=0.05)),
    "fedavg, momentum clients": lambda: fedavg(on_clients(model(), optim.sgd(0.1, momentum=0.9))),
    "fedavg, adam clients": lambda: fedavg(on_clients(model(), optim.adam(0.02))),
    "fedavg, weight decay": lambda: fedavg(on_clients(model(), optim.sgd(0.1, weight_decay=0.1))),
    "fedprox": lambda: fedprox(on_clients(model()), mu=0.5),
    "fedavgm": lambda: fedavgm(on_clients(model())),
    "fedadam": lambda: fedadam(on_clients(model())),
    "parallel": mixed(parallel),
    "gradient_1way": mixed(gradient_1way),
    "gradient_1way, momentum clients": mixed(gradient_1way, optim.sgd(0.1, momentum=0.9)),
    "gradient_2way": mixed(gradient_2way),
    "gradient_2way, adam clients": mixed(gradient_2way, optim.adam(0.02)),
    "gradient_2way, adam at the merge": mixed(gradient_2way, merge=optim.adam(0.05)),
}


def train(algorithm: Algorithm, executor: str = "loop", *, rounds: int = 4, **options: object) -> Result:
    simulator = Simulator(executor, threads=2, **{"chunk": 3 if executor == "vmap" else None} | options)
    return run(algorithm, clients(), central=centre(), rounds=rounds, cohort=4, seed=5, backend=simulator)


def assert_same(a: Result, b: Result, tolerance: float = 1e-9) -> None:
    for name, x in a.params.items():
        torch.testing.assert_close(x, b.params[name], rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_result_is_that_of_full_tables(name: str, executor: str) -> None:
    full = train(ALGORITHMS[name]())
    # Adam turns round-off in a gradient of almost nothing into a step.
    assert_same(full, train(exchange_rows(ALGORITHMS[name]()), executor), 1e-6 if "adam clients" in name else 1e-9)
    assert not torch.equal(full.params[TABLE], model().initial()[TABLE])


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "gradient_1way"])
def test_in_place_changes_nothing_but_the_memory(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    assert_same(train(algorithm), train(exchange_rows(ALGORITHMS[name](), in_place=True), "vmap"))
    assert torch.equal(algorithm.model.initial()[TABLE], model().initial()[TABLE])


def one_round(
    data: FederatedData, executor: str = "loop", algorithm: Algorithm | None = None, **options: object
) -> Result:
    algorithm = algorithm or exchange_rows(fedavg(on_clients(model())))
    return run(algorithm, data, rounds=1, cohort=len(data), backend=Simulator(executor, threads=1, **options))


def only(x: list[list[int]], y: list[int]) -> dict[str, np.ndarray]:
    return {"x": np.array([row + [-1] * (HISTORY - len(row)) for row in x]), "y": np.array(y)}


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize(
    "data",
    [
        [only([[3]], [4])],
        [only([[]], [4])],
        [only([[i] for i in range(ITEMS)], list(range(ITEMS)))],
        [only([[3]], [4]), only([[i] for i in range(ITEMS)], list(range(ITEMS)))],
    ],
    ids=["one example", "a history of nothing", "all rows", "one example beside all rows"],
)
def test_clients_of_every_size(data: list[dict[str, np.ndarray]], executor: str) -> None:
    federated = FederatedData.from_datasets(data)
    assert_same(one_round(federated, algorithm=fedavg(on_clients(model()))), one_round(federated, executor))


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize(("wrong", "told"), [(ITEMS, f"id {ITEMS} in 'y'"), (-2, "id -2 in 'y'")])
def test_an_id_out_of_range_names_the_client(executor: str, wrong: int, told: str) -> None:
    federated = FederatedData.from_datasets([only([[3]], [4]), only([[5], [6]], [1, wrong])])
    with pytest.raises(InputError, match=f"Client 1 of 'clients' has the {told}.*rows 0 to {ITEMS - 1}"):
        one_round(federated, executor, algorithm=exchange_rows(fedavg(on_clients(model(), epochs=1))))


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize(
    ("name", "parts"), [("fedavg", 1), ("parallel", 1), ("gradient_1way", 2), ("gradient_2way", 2)]
)
def test_the_ledger_counts_rows_by_hand(name: str, parts: int, executor: str) -> None:
    """Two clients touch 3 and 5 movies; a row is WIDTH numbers of 8 bytes, naming one costs 4 bytes."""
    data = FederatedData.from_datasets([only([[3, 7], [3]], [7, 9]), only([[1, 2], [3]], [4, 5])])
    algorithm = exchange_rows(ALGORITHMS[name]())
    ledger = one_round(data, executor, algorithm).ledger
    rows, row, tower = 3 + 5, WIDTH * 8, (WIDTH * WIDTH + WIDTH) * 8
    steps = 4 * 2 if name == "gradient_2way" else 0  # the number of steps, one 32-bit number a client
    assert ledger["bytes_down"] == parts * (rows * row + 2 * tower)
    assert ledger["bytes_up"] == rows * row + 2 * tower + 4 * rows + steps


def test_full_tables_are_counted_in_full() -> None:
    data = FederatedData.from_datasets([only([[3]], [4])])
    ledger = one_round(data, algorithm=fedavg(on_clients(model()))).ledger
    assert ledger["bytes_down"] == ledger["bytes_up"] == (ITEMS * WIDTH + WIDTH * WIDTH + WIDTH) * 8


def test_by_touch_averages_over_those_who_had_the_row() -> None:
    """Clients of equal weight; movie 4 is in the first one's examples only, movie 3 in both."""
    one, other = only([[3]], [4]), only([[3]], [5])
    start = model().initial()[TABLE]
    alone = one_round(FederatedData.from_datasets([one])).params[TABLE] - start
    other_alone = one_round(FederatedData.from_datasets([other])).params[TABLE] - start
    both = FederatedData.from_datasets([one, other])
    plain = one_round(both).params[TABLE] - start
    touched = one_round(both, algorithm=exchange_rows(fedavg(on_clients(model())), by_touch=True)).params[TABLE] - start
    torch.testing.assert_close(plain[4], alone[4] / 2)
    torch.testing.assert_close(touched[4], alone[4])
    torch.testing.assert_close(touched[5], other_alone[5])
    torch.testing.assert_close(touched[3], plain[3])


def test_two_tables_with_the_same_ids() -> None:
    class Two(DualEncoder):
        tables: ClassVar = {"embedding.weight": ("x", "y"), "bias.weight": ("x", "y")}

        def __init__(self) -> None:
            super().__init__(ITEMS, WIDTH)
            self.bias = torch.nn.Embedding(ITEMS + 2, 1)

        def forward(self, seen: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            return super().forward(seen, following) + self.bias(following)[..., 0]

    def make() -> Algorithm:
        torch.manual_seed(0)
        return fedavg(on_clients(Model(Two(), hinge, dtype=torch.float64)))

    for executor in ("loop", "vmap"):
        assert_same(train(make()), train(exchange_rows(make()), executor))


def test_an_upload_that_is_not_finite_is_dropped_with_its_rows() -> None:
    data = clients()
    bad = {n: x.copy() for n, x in data.arrays.items()}
    weights = np.ones(len(bad["y"]))
    weights[0] = np.nan  # the first client has a single example

    def weighted(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return hinge(outputs, batch) * batch["w"]

    torch.manual_seed(0)
    one = Model(DualEncoder(ITEMS, WIDTH), weighted, dtype=torch.float64)
    federated = FederatedData(bad | {"w": weights}, data.offsets)
    loop = one_round(federated, "loop", exchange_rows(fedavg(on_clients(one))))
    vmap = one_round(federated, "vmap", exchange_rows(fedavg(on_clients(one))))
    assert loop.dropped == vmap.dropped == 1
    assert_same(loop, vmap)
    assert_same(loop, one_round(federated, "loop", fedavg(on_clients(one))))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: exchange_rows(fedavg(on_clients(small_mlp()))), "needs a model with tables"),
        (lambda: exchange_rows(local_only(on_clients(model()))), "keeps models on clients"),
        (lambda: exchange_rows(exchange_rows(fedavg(on_clients(model())))), "exchanges rows already"),
        (lambda: Model(DualEncoder(3, 2), hinge, tables={"nothing": ["x"]}), "not a trainable parameter"),
        (lambda: Model(DualEncoder(3, 2), hinge, tables={"embedding.weight": []}), "needs a list of the fields"),
        (
            lambda: Model(DualEncoder(3, 2), hinge, tables={"embedding.weight": ["x", "y"], "hidden.weight": ["y"]}),
            "share a field of ids",
        ),
        (
            lambda: compress(exchange_rows(fedavg(on_clients(model()))), upload={"delta": quantize(8)}),
            "cannot be compressed",
        ),
        (
            lambda: exchange_rows(compress(fedavg(on_clients(model())), upload={"delta": quantize(8)})),
            "cannot be compressed",
        ),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make()


def test_a_transferred_gradient_needs_equal_steps() -> None:
    one = model()
    algorithm = gradient_1way(Population(on_clients(one, epochs=1)), Centre(regulariser(one), needs_data=False))
    with pytest.raises(InputError, match="give steps instead of epochs"):
        train(exchange_rows(algorithm))
