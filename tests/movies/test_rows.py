"""Row exchange gives what full tables give, and counts what it sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from mixfed.algorithms.asynchronous import ca2fl, fedasync, fedbuff
from mixfed.algorithms.baselines import local
from mixfed.algorithms.fedavg import fedadam, fedavg, fedavgm, fedprox
from mixfed.algorithms.mixed import Centre, Population, gradient_1way, gradient_2way, parallel
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import optim
from mixfed.core.algorithm import Algorithm, Reply, Server
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import Dropouts, HalfNormal, Scripted
from mixfed.core.loop import Result
from mixfed.core.losses import hinge
from mixfed.core.model import Model
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.models.recommender import DualEncoder
from mixfed.transforms import compress, quantize
from mixfed.transforms.rows.exchange import exchange_rows
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


DECAY = optim.sgd(0.1, weight_decay=0.1)
LATE: dict[str, Make] = {
    "fedavg, weight decay": ALGORITHMS["fedavg, weight decay"],
    "fedprox, weight decay": lambda: fedprox(on_clients(model(), DECAY), mu=0.5),
    "fedbuff, weight decay": lambda: fedbuff(on_clients(model(), DECAY), buffer=0),
    "fedbuff, buffer of 3": lambda: fedbuff(on_clients(model(), DECAY), buffer=3),
    "fedasync": lambda: fedasync(on_clients(model())),
    "ca2fl, weight decay": lambda: ca2fl(on_clients(model(), DECAY), buffer=2),
    "gradient_1way": ALGORITHMS["gradient_1way"],
    "gradient_2way": ALGORITHMS["gradient_2way"],
    "gradient_2way, adam clients": ALGORITHMS["gradient_2way, adam clients"],
}


def train_late(algorithm: Algorithm, *, rounds: int = 8, late: str = "use", **options: Any) -> Result:
    schedule = Schedule(2, HalfNormal(2.0), late=late)  # type: ignore[arg-type]
    backend = Simulator("loop", threads=1)
    options = {"central": centre(), "rounds": rounds, "seed": 5, "schedule": schedule, "backend": backend} | options
    return run(algorithm, clients(), **options)


@pytest.mark.parametrize("name", LATE)
def test_late_clients_are_completed_by_the_message_they_had(name: str) -> None:
    """What happens to rows that a late client did not touch follows from its own message, not from the newest one."""
    full = train_late(LATE[name]())
    assert_same(full, train_late(exchange_rows(LATE[name]())), 1e-6 if "adam clients" in name else 1e-9)


def test_late_clients_are_completed_after_a_resume(tmp_path: Path) -> None:
    algorithm = exchange_rows(LATE["gradient_1way"]())
    whole = train_late(algorithm)
    train_late(algorithm, rounds=3, checkpoints=Checkpoints(tmp_path))
    resumed = train_late(algorithm, checkpoints=Checkpoints(tmp_path), resume=True)
    assert all(torch.equal(x, resumed.params[n]) for n, x in whole.params.items())
    assert whole.ledger == resumed.ledger


def test_in_place_writes_into_the_states_own_table() -> None:
    algorithm = ALGORITHMS["fedavg"]()
    tables: list[torch.Tensor] = []
    rows = exchange_rows(algorithm, in_place=True)
    seen = run(
        rows, clients(), rounds=4, cohort=4, seed=5, backend=Simulator("vmap", threads=2, chunk=3),
        callbacks=[lambda record: tables.append(record.params[TABLE])],
    )  # fmt: skip
    assert_same(train(algorithm), seen)
    assert len({x.data_ptr() for x in tables}) == 1
    assert torch.equal(algorithm.model.initial()[TABLE], model().initial()[TABLE])


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (ALGORITHMS["fedavg"], Schedule(2, HalfNormal(2.0), late="use")),
        (ALGORITHMS["fedavg"], Schedule(2, concurrency=4)),
        (lambda: fedbuff(on_clients(model()), buffer=3), Schedule(4)),
    ],
)
def test_in_place_is_refused_where_clients_may_be_late(make: Make, schedule: Schedule) -> None:
    with pytest.raises(InputError, match="changes under clients that are still at work"):
        run(exchange_rows(make(), in_place=True), clients(), rounds=1, schedule=schedule)


def test_in_place_is_refused_where_every_row_moves() -> None:
    for name in ("fedadam", "gradient_1way"):
        with pytest.raises(InputError, match="moves every row; leave out in_place"):
            exchange_rows(ALGORITHMS[name](), in_place=True)
    with pytest.raises(InputError, match="Weight decay on clients moves every row"):
        train(exchange_rows(ALGORITHMS["fedavg, weight decay"](), in_place=True))


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


@pytest.mark.parametrize("late", ["discard", "use"])
@pytest.mark.parametrize("concurrency", [0, 4])
def test_what_is_sent_counts_whatever_becomes_of_it(late: str, concurrency: int) -> None:
    """Clients that touch all rows are sent as many bytes as with full tables: late, lost and in flight ones too."""
    data = FederatedData.from_datasets([only([[i] for i in range(ITEMS)], list(range(ITEMS)))] * 30)
    delays = HalfNormal(2.0) if concurrency else Dropouts(HalfNormal(2.0), 0.2)
    schedule = Schedule(3, delays, concurrency=concurrency, late=late, patience=3)  # type: ignore[arg-type]
    seen: list[list[int]] = []
    for make in (lambda a: a, exchange_rows):
        algorithm = make(fedavg(on_clients(model(), epochs=1)))
        down: list[int] = []
        backend, count = (
            Simulator("loop", threads=1),
            lambda record, down=down: down.append(record.ledger["bytes_down"]),
        )
        run(algorithm, data, rounds=6, schedule=schedule, seed=1, backend=backend, callbacks=[count])
        seen.append(down)
    assert seen[0] == seen[1]


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


def reply(rows: list[int], touched: list[float], weight: float, source: str = "clients") -> Reply:
    """Rows of ones."""
    values = {"delta": {TABLE: torch.ones(len(rows), WIDTH, dtype=torch.float64)}}
    ids = {TABLE: torch.tensor(rows)}
    return Reply(values, weight, (0,), source, 0, ids, {TABLE: torch.tensor(touched, dtype=torch.float64)})


def test_by_touch_pools_all_replies_of_a_step() -> None:
    """Replies of weight 1 and 3 are means over all their clients. Movie 2: everyone of the first (1·1) and a third of
    the second (3·1/3) touched it, with the sum 1·1 + 3·1 = 4, so 4/2. Movie 4: half of the first, 1/(1/2). Movie 5:
    all of the second, 3/3. What another source touched counts there only.
    """
    algorithm = exchange_rows(fedavg(on_clients(model())), by_touch=True)
    state = algorithm.init(model().initial())
    before = state["params"][TABLE].clone()
    replies = [reply([2, 4], [1.0, 0.5], 1.0), reply([2, 5], [1 / 3, 1.0], 3.0)]
    moved = algorithm.step(state, replies, Server(0, 0, algorithm.model))["params"][TABLE] - before
    expected = {2: 2.0, 4: 2.0, 5: 1.0}
    for row in range(ITEMS):
        torch.testing.assert_close(moved[row], torch.full((WIDTH,), expected.get(row, 0.0), dtype=torch.float64))


@pytest.mark.parametrize("make", [lambda t: fedavg(t), lambda t: fedbuff(t, buffer=0, rule="constant")])
def test_by_touch_does_not_depend_on_how_clients_are_grouped(make: Callable[[LocalTrainer], Algorithm]) -> None:
    """Two clients of one round arrive in groups of their own where a late one comes with one that is not."""
    one, other = only([[3]], [4]), only([[3]], [5])
    data = FederatedData.from_datasets([one, other])
    slow = Scripted({(0, 0): 1.5})  # client 0, asked in round 0, arrives with client 1's second job
    algorithm = exchange_rows(make(on_clients(model())), by_touch=True)
    alone = one_round(FederatedData.from_datasets([one])).params[TABLE] - model().initial()[TABLE]
    start: dict[int, torch.Tensor] = {}
    result = run(
        algorithm, data, rounds=2, schedule=Schedule(2, slow, late="use"), backend=Simulator("loop", threads=1),
        callbacks=[lambda record: start.setdefault(record.round, record.params[TABLE].clone())],
    )  # fmt: skip
    torch.testing.assert_close(start[1][4], model().initial()[TABLE][4])
    torch.testing.assert_close(result.params[TABLE][4] - start[1][4], alone[4])


class Two(DualEncoder):
    tables: ClassVar = {"bias.weight": ("x", "y"), "embedding.weight": ("x", "y")}

    def __init__(self) -> None:
        super().__init__(ITEMS, WIDTH)
        self.bias = torch.nn.Embedding(ITEMS + 2, 1)

    def forward(self, seen: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return super().forward(seen, following) + self.bias(following)[..., 0]


def with_two_tables() -> Algorithm:
    torch.manual_seed(0)
    return fedavg(on_clients(Model(Two(), hinge, dtype=torch.float64), epochs=1))


def test_two_tables_with_the_same_ids() -> None:
    for executor in ("loop", "vmap"):
        assert_same(train(with_two_tables()), train(exchange_rows(with_two_tables()), executor))


def test_an_id_that_the_smaller_of_two_tables_lacks_names_that_table() -> None:
    data = FederatedData.from_datasets([only([[3], [3]], [4, ITEMS])])
    with pytest.raises(InputError, match=f"the table 'embedding.weight' has the rows 0 to {ITEMS - 1}"):
        one_round(data, algorithm=exchange_rows(with_two_tables()))


def test_a_table_with_a_field_that_the_data_lack() -> None:
    torch.manual_seed(0)
    one = Model(DualEncoder(ITEMS, WIDTH), hinge, tables={TABLE: ["x", "y", "z"]})
    with pytest.raises(InputError, match="indexed by the field 'z', and the examples of 'clients' have x, y"):
        one_round(clients(), algorithm=exchange_rows(fedavg(on_clients(one))))


def test_a_loss_of_ones_own_reads_what_it_likes() -> None:
    """The server asks what a step does without examples, and such a loss need not know how to answer."""

    def with_loss(trainer: LocalTrainer) -> LocalTrainer:
        def loss(params: Params, batch: Batch) -> torch.Tensor:
            return trainer.model.loss(params, {n: batch[n] for n in ("x", "y")}) * 0.5

        return replace(trainer, loss=loss)

    def made() -> Algorithm:
        return gradient_1way(Population(with_loss(on_clients(one, DECAY))), Centre(regulariser(one), needs_data=False))

    one = model()
    assert_same(train(made()), train(exchange_rows(made())))
    for algorithm in (fedprox(with_loss(on_clients(one, DECAY))), fedavg(with_loss(on_clients(one)))):
        assert_same(train(algorithm), train(exchange_rows(algorithm)))


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
        (lambda: exchange_rows(local(on_clients(model()))), "keep the table"),
        (lambda: exchange_rows(exchange_rows(fedavg(on_clients(model())))), "exchange rows already"),
        (lambda: Model(DualEncoder(3, 2), hinge, tables={"nothing": ["x"]}), "not a trainable parameter"),
        (lambda: Model(DualEncoder(3, 2), hinge, tables={"embedding.weight": []}), "needs a list of the fields"),
        (
            lambda: Model(DualEncoder(3, 2), hinge, tables={"embedding.weight": ["x", "y"], "hidden.weight": ["y"]}),
            "share a field of ids",
        ),
        (lambda: exchange_rows(LATE["fedasync"](), by_touch=True), "fedasync takes every client's upload by itself"),
        (lambda: exchange_rows(LATE["ca2fl, weight decay"](), by_touch=True), "leave out by_touch"),
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
