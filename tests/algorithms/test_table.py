"""Every algorithm through the same checks: a new algorithm is one more row of ``ROWS``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mixfed.algorithms.baselines import local
from mixfed.algorithms.fedavg import fedadam, fedavg, fedprox
from mixfed.algorithms.feddle.search import Search, feddle
from mixfed.algorithms.local_global import local_global
from mixfed.algorithms.makers import Setup
from mixfed.algorithms.mixed import gradient_1way, gradient_2way, parallel
from mixfed.algorithms.registry import ALGORITHMS
from mixfed.backends.distributed.engine import Distributed
from mixfed.backends.distributed.ranks import Ranks
from mixfed.backends.loopback import Loopback
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import optim
from mixfed.core.algorithm import Algorithm, Private, Server
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import Dropouts, HalfNormal
from mixfed.core.loop import Result
from mixfed.core.model import Model
from mixfed.core.private import PrivateStore
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.evaluate.metrics import evaluator
from mixfed.transforms import compress, quantize, top_k
from mixfed.transforms.rows.exchange import exchange_rows
from tests.problems import blobs, small_mlp, small_table
from tests.ranks import on_ranks

FEDERATED, CENTRAL, TEST = blobs()
ROUNDS = 4


def setup(optimizer: optim.Optimizer | None = None, model: Model | None = None) -> Setup:
    model = model or small_mlp()
    return Setup(
        client=LocalTrainer(model, optimizer or optim.sgd(0.1), Batching(3, epochs=2)),
        server=optim.sgd(1.0),
        rounds=ROUNDS,
        centre=LocalTrainer(model, optim.sgd(0.1), Batching(8, steps=3)),
        weights=(0.5, 0.5),
    )


def registered(name: str) -> Callable[[], Algorithm]:
    return lambda: ALGORITHMS[name].make(setup())


def on(make: Callable[[Setup], Algorithm], optimizer: optim.Optimizer | None = None) -> Callable[[], Algorithm]:
    return lambda: make(setup(optimizer))


def by_rows(make: Callable[[Setup], Algorithm], **options: bool) -> Callable[[], Algorithm]:
    """On a model with a table, of which clients exchange rows."""

    def made() -> Algorithm:
        model = small_table()
        client = LocalTrainer(model, optim.sgd(0.1), Batching(3, steps=4))
        centre = LocalTrainer(model, optim.sgd(0.1), Batching(8, steps=3))
        given = Setup(client, optim.sgd(1.0), ROUNDS, centre, weights=(0.5, 0.5))
        return exchange_rows(make(given), **options)

    return made


def head(name: str) -> bool:
    return name.startswith("2.")


OTHERS: dict[str, Callable[[], Algorithm]] = {
    "fedavg, momentum clients": on(lambda s: fedavg(s.client), optim.sgd(0.05, momentum=0.9, nesterov=True)),
    "fedavg, decayed and clipped": on(
        lambda s: fedavg(LocalTrainer(s.client.model, optim.sgd(0.2, decay=0.9), s.client.batching, clip=0.5))
    ),
    "fedavg, weight decay": on(lambda s: fedavg(s.client), optim.sgd(0.1, weight_decay=0.01)),
    "fedavg, adam clients": on(lambda s: fedavg(s.client), optim.adam(0.02)),
    "fedavg, adagrad clients": on(lambda s: fedavg(s.client), optim.adagrad(0.1)),
    "fedavg, yogi clients": on(lambda s: fedavg(s.client), optim.yogi(0.02)),
    "local, adam clients": on(lambda s: local(s.client), optim.adam(0.02)),
    "gradient_2way, momentum clients": on(
        lambda s: gradient_2way(s.population(), s.central_source()), optim.sgd(0.02, momentum=0.9)
    ),
    "gradient_2way, adam at the merge": on(
        lambda s: gradient_2way(s.population(), s.central_source(), merge=optim.adam(0.05))
    ),
    "gradient_2way, by clients": on(lambda s: ALGORITHMS["gradient_2way"].make(s, by_clients=True)),
    "parallel, alpha": on(lambda s: parallel(s.client, s.at_centre(), alpha=0.4)),
    "gradient_1way, 8-bit gradient": on(
        lambda s: compress(gradient_1way(s.population(), s.central_source()), message={"correction": quantize(8)})
    ),
    "gradient_2way, sparse both ways": on(
        lambda s: compress(
            gradient_2way(s.population(), s.central_source()),
            message={"correction": top_k(0.3)},
            upload={"delta": top_k(0.3)},
            error_feedback=True,
        )
    ),
    "fedasync, hinge": on(lambda s: ALGORITHMS["fedasync"].make(s, rule="hinge", alpha=0.3, a=2.0, b=1.0)),
    "feddle, 8-bit anchors": on(lambda s: feddle(s.client, Search(s.at_centre().batching), atlas=9, bits=8)),
    "feddle, anchors on disk": on(lambda s: feddle(s.client, Search(s.at_centre().batching), atlas=9, place="disk")),
    "feddle, falling back on ca2fl": on(
        lambda s: feddle(
            s.client, Search(s.at_centre().batching), atlas=9, fallback=ALGORITHMS["ca2fl"].make(s, buffer=0)
        )
    ),
    "feddle, falling back on fedadam": on(
        lambda s: feddle(s.client, Search(s.at_centre().batching), atlas=9, fallback=fedadam(s.client))
    ),
    "feddle, out of domain": on(
        lambda s: feddle(s.client, Search(s.at_centre().batching, "out_of_domain", regularisation=0.01), atlas=14)
    ),
    "fedavg, head global": on(lambda s: local_global(fedavg(s.client), head)),
    "fedavg, head global, warm start": on(lambda s: local_global(fedavg(s.client), head, warm_start=2)),
    "fedprox, first layer global": on(lambda s: local_global(fedprox(s.client, mu=0.1), lambda n: not head(n))),
    "fedadam, head global": on(lambda s: local_global(fedadam(s.client, learning_rate=0.05), head)),
    "parallel, head global": on(lambda s: local_global(parallel(s.population(), s.central_source()), head)),
    "gradient_1way, head global": on(lambda s: local_global(gradient_1way(s.population(), s.central_source()), head)),
    "gradient_2way, head global": on(lambda s: local_global(gradient_2way(s.population(), s.central_source()), head)),
    "fedasync, head global": on(lambda s: local_global(ALGORITHMS["fedasync"].make(s), head)),
    "fedbuff, head global, warm start": on(lambda s: local_global(ALGORITHMS["fedbuff"].make(s), head, warm_start=2)),
    "ca2fl, head global, warm start": on(lambda s: local_global(ALGORITHMS["ca2fl"].make(s), head, warm_start=2)),
    "hfcl, head global": on(lambda s: local_global(ALGORITHMS["hfcl"].make(s), head)),
    "feddle, head global, warm start": on(lambda s: local_global(ALGORITHMS["feddle"].make(s), head, warm_start=2)),
    "fedavg, head global, 8-bit uploads": on(
        lambda s: compress(local_global(fedavg(s.client), head), upload={"delta": quantize(8)}, error_feedback=True)
    ),
    "fedavg, rows": by_rows(lambda s: fedavg(s.client)),
    "fedavg, rows by touch": by_rows(lambda s: fedavg(s.client), by_touch=True),
    "fedadam, rows": by_rows(lambda s: fedadam(s.client, learning_rate=0.05)),
    "parallel, rows": by_rows(lambda s: parallel(s.population(), s.central_source())),
    "gradient_1way, rows": by_rows(lambda s: gradient_1way(s.population(), s.central_source())),
    "gradient_2way, rows": by_rows(lambda s: gradient_2way(s.population(), s.central_source())),
    "fedavg, 4-bit uploads": on(lambda s: compress(fedavg(s.client), upload={"delta": quantize(4)})),
}

ADAPTIVE = 2e-5
"""Adaptive optimizers divide by small numbers, so that round-off grows."""


@dataclass(frozen=True)
class Row:
    """An algorithm, how closely executors agree on it, the data on which its loss falls, and whether a codec rounds:
    a coordinate on the edge between two levels may fall to either side after round-off, so one round is compared."""

    make: Callable[[], Algorithm]
    tolerance: float = 2e-6
    learns_on: Literal["clients", "centre", "all"] = "clients"
    rounds_off: bool = False


MIXING = ("parallel", "gradient_1way", "gradient_2way")
LEARN_ON_ALL = [
    *(*MIXING, "example_transfer", "parallel, alpha"),
    *(f"{name}, {how}" for name in MIXING for how in ("head global", "rows")),
    *("gradient_2way, momentum clients", "gradient_2way, adam at the merge", "gradient_2way, by clients"),
    *("gradient_1way, 8-bit gradient", "gradient_2way, sparse both ways"),
]
ARE_ADAPTIVE = [
    *("fedadam", "fedyogi", "fedadagrad", "fedadam, rows", "fedadam, head global", "feddle, falling back on fedadam"),
    *("fedavg, adam clients", "fedavg, adagrad clients", "fedavg, yogi clients", "local, adam clients"),
    "gradient_2way, adam at the merge",
]
ROUND_OFF = [
    *("gradient_1way, 8-bit gradient", "gradient_2way, sparse both ways", "feddle, 8-bit anchors"),
    *("fedavg, head global, 8-bit uploads", "fedavg, 4-bit uploads"),
]


def row_of(name: str, make: Callable[[], Algorithm]) -> Row:
    learns_on = "all" if name in LEARN_ON_ALL else "centre" if name == "center" else "clients"
    return Row(make, ADAPTIVE if name in ARE_ADAPTIVE else 2e-6, learns_on, name in ROUND_OFF)


ROWS = {name: row_of(name, make) for name, make in ({name: registered(name) for name in ALGORITHMS} | OTHERS).items()}

every_row = pytest.mark.parametrize("row", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ROWS])
"""The tests of a row run in one process, which makes its plain runs once."""

SCHEDULES = {
    "synchronous": Schedule(7),
    "late": Schedule(4, delays=Dropouts(HalfNormal(1.5), 0.05), late="use", patience=6),
    "refilled": Schedule(3, delays=HalfNormal(1.0), concurrency=5, late="use"),
}


def train(algorithm: Algorithm, executor: str = "loop", schedule: str = "synchronous", **options: Any) -> Result:
    backend = Simulator(
        executor, **{"threads": 1} | {k: options.pop(k) for k in ("threads", "chunk", "private_folder") if k in options}
    )
    how = {"rounds": ROUNDS, "seed": 3, "schedule": SCHEDULES[schedule], "backend": backend} | options
    return run(algorithm, FEDERATED, central=CENTRAL, **how)


@cache
def plain(row: str, executor: str = "loop", schedule: str = "synchronous") -> Result:
    """A run without any interruption."""
    evaluate = evaluator((algorithm := ROWS[row].make()).model, TEST, personal=algorithm.personal)
    return train(algorithm, executor, schedule, evaluate=evaluate)


def learnt(result: Result) -> Params:
    """Everything that was learnt: the common model and every client's own."""
    return result.params | own_parts(result.privates.items("clients"))


def own_parts(privates: Iterable[tuple[int, Private]]) -> Params:
    return {
        f"{client}/{part}/{n}": x
        for client, private in privates
        for part, leaves in private.items()
        for n, x in leaves.items()
    }


def assert_close(a: Result, b: Result, tolerance: float) -> None:
    left, right = learnt(a), learnt(b)
    assert left.keys() == right.keys()
    for name, x in left.items():
        torch.testing.assert_close(x, right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal(left: Params, right: Params) -> None:
    assert left.keys() == right.keys()
    assert [name for name, x in left.items() if not torch.equal(x, right[name])] == []


def test_the_table_has_every_algorithm_and_no_trait_of_another() -> None:
    assert set(ALGORITHMS) <= set(ROWS)
    assert {*LEARN_ON_ALL, *ARE_ADAPTIVE, *ROUND_OFF} <= set(ROWS)


@every_row
def test_learns(row: str) -> None:
    """The loss falls on what the algorithm trains on: the clients' data, the centre's, or, where it mixes, both."""
    algorithm = ROWS[row].make()
    seen = {"all": TEST, "centre": CENTRAL, "clients": FEDERATED.pooled()}[ROWS[row].learns_on]
    evaluate = evaluator(algorithm.model, seen, personal=algorithm.personal)
    after = train(algorithm, "vmap", rounds=18, evaluate=evaluate, every=18).metrics["loss"]
    before = evaluator(algorithm.model, seen)(algorithm.model.initial(), PrivateStore(dict))["loss"]
    assert after < 0.85 * before


@every_row
def test_executors_agree(row: str) -> None:
    make = ROWS[row].make
    if ROWS[row].rounds_off:
        assert_close(train(make(), rounds=1), train(make(), "vmap", rounds=1), 2e-5)
        return
    tolerance = ROWS[row].tolerance
    loop, whole = plain(row), plain(row, "vmap")
    assert_close(loop, whole, tolerance)
    assert loop.ledger == whole.ledger
    assert_close(loop, train(make(), threads=3), tolerance)
    assert_close(loop, train(make(), "vmap", chunk=3, threads=2), tolerance)


@pytest.mark.parametrize(
    ("executor", "schedule"), [("loop", "synchronous"), ("vmap", "synchronous"), ("loop", "late"), ("loop", "refilled")]
)
@every_row
def test_resumed_is_bit_identical(row: str, executor: str, schedule: str, tmp_path: Path) -> None:
    """Also with jobs in flight. The first part of the run is stopped after two rounds."""
    straight = plain(row, executor, schedule)
    rounds: list[int] = []

    def part(**options: Any) -> Result:
        algorithm = ROWS[row].make()
        evaluate = evaluator(algorithm.model, TEST, personal=algorithm.personal)
        checkpoints = Checkpoints(tmp_path, every=1)
        return train(algorithm, executor, schedule, evaluate=evaluate, checkpoints=checkpoints, **options)

    stopped = part(callbacks=[lambda record: rounds.append(record.round)], should_stop=lambda: len(rounds) == 1)
    assert not stopped.finished
    resumed = part(resume=True)
    assert_equal(learnt(straight), learnt(resumed))
    assert straight.ledger == resumed.ledger
    assert straight.history == resumed.history


@pytest.mark.parametrize("schedule", SCHEDULES)
@every_row
def test_over_bytes_alone_everything_is_the_same(row: str, schedule: str) -> None:
    """Runtimes that know nothing of server and other clients, behind bytes: the simulator's parameters to the last bit,
    and its ledger. What passed the wire is what the ledger counts, but for framing."""
    here, loopback = plain(row, "loop", schedule), Loopback()
    there = train(ROWS[row].make(), schedule=schedule, backend=loopback)
    assert_equal(here.params, there.params)
    kept = [(client, runtime.privates.get("clients", client)) for (_, client), runtime in loopback.runtimes.items()]
    seen = here.privates.seen("clients").tolist()
    assert_equal(own_parts(here.privates.items("clients")), own_parts((c, p) for c, p in kept if c in seen))
    assert here.ledger == there.ledger
    down, up = there.ledger["bytes_down"], there.ledger["bytes_up"]
    passed = loopback.letters
    assert down <= passed.wire_down <= down + passed.frames_down
    assert up <= passed.wire_up <= up + passed.frames_up


@every_row
def test_resumed_over_bytes(row: str, tmp_path: Path) -> None:
    """With requests in flight and private parts on the devices."""
    rounds: list[int] = []

    def part(**options: Any) -> Result:
        how = {"checkpoints": Checkpoints(tmp_path, every=1), "backend": Loopback()} | options
        return train(ROWS[row].make(), schedule="late", **how)

    part(callbacks=[lambda record: rounds.append(record.round)], should_stop=lambda: len(rounds) == 1)
    resumed, straight = part(resume=True), plain(row, "loop", "late")
    assert_equal(straight.params, resumed.params)
    assert straight.ledger == resumed.ledger


def on_two_ranks(ranks: Ranks) -> dict[tuple[str, str], tuple[Params, dict[str, int]]]:
    """What this rank's runs learnt, with the private parts of its own clients, and the ledger of each."""
    found = {}
    for row, schedule in product(ROWS, SCHEDULES):
        backend = Distributed(ranks, "loop", threads=1, deterministic_sum=schedule == IN_ORDER)
        result = train(ROWS[row].make(), schedule=schedule, backend=backend)
        found[row, schedule] = learnt(result), result.ledger
    return found


IN_ORDER = "late"
"""The schedule under which ranks add in the order of one process."""


def test_two_ranks_learn_the_same() -> None:
    """All rows under all schedules in one pair of processes: parameters, private parts and the ledger.

    Where the order of additions is fixed they are equal to the last bit.
    """
    first, second = on_ranks(on_two_ranks)
    for row, schedule in product(ROWS, SCHEDULES):
        if in_order := schedule == IN_ORDER:
            backend = Simulator("loop", deterministic_sum=True)
            alone = train(ROWS[row].make(), schedule=schedule, backend=backend)
        else:
            alone = plain(row, "loop", schedule)
        (ours, ledger), (theirs, _) = first[row, schedule], second[row, schedule]
        assert_equal({n: ours[n] for n in alone.params}, {n: theirs[n] for n in alone.params})
        both, wanted, bound = ours | theirs, learnt(alone), 0.0 if in_order else 1e-6
        assert both.keys() == wanted.keys(), (row, schedule)
        for name, x in wanted.items():
            where = f"{row}, {schedule}, {name}"
            torch.testing.assert_close(both[name], x, rtol=bound, atol=bound, msg=lambda m, at=where: f"{at}: {m}")
        assert ledger == alone.ledger, (row, schedule)


@every_row
def test_another_seed_gives_another_model(row: str) -> None:
    mine, other = learnt(plain(row)), learnt(train(ROWS[row].make(), seed=4))
    assert any(n not in mine or not torch.equal(x, mine[n]) for n, x in other.items())


@every_row
def test_arguments_are_left_alone(row: str) -> None:
    """Functions of an algorithm leave what they are given as it was, but for the atlas, which a step of Feddle owns."""
    algorithm = ROWS[row].make()

    def watched(function: Callable[..., Any], owned: tuple[str, ...] = ()) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            before = [copy_of(argument, owned) for argument in arguments]
            found = function(*arguments)
            for argument, copy in zip(arguments, before, strict=True):
                assert_equal(copy_of(argument, owned), copy)
            return found

        return call

    owned = ("atlas",)
    guarded = replace(
        algorithm,
        init=watched(algorithm.init),
        broadcast=watched(algorithm.broadcast),
        client=watched(algorithm.client),
        step=watched(algorithm.step, owned),
        params=watched(algorithm.params),
        diagnostics=watched(algorithm.diagnostics),
    )
    assert_equal(train(guarded).params, plain(row).params)


def copy_of(argument: Any, owned: tuple[str, ...] = ()) -> Params:
    """All tensors in an argument, copied, by where they are."""
    if isinstance(argument, torch.Tensor):
        return {"": argument.clone()}
    if isinstance(argument, Mapping):
        parts = {str(n): x for n, x in argument.items() if n not in owned}
    elif isinstance(argument, list | tuple):
        parts = {str(i): x for i, x in enumerate(argument)}
    elif is_dataclass(argument) and not isinstance(argument, Server):
        parts = {f.name: getattr(argument, f.name) for f in fields(argument)}
    else:
        return {}
    return {f"{name}/{n}": x for name, part in parts.items() for n, x in copy_of(part, owned).items()}
