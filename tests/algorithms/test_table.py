"""Every algorithm through the same checks: a new algorithm is one more row of ``ROWS``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mixfed.algorithms.baselines import local_only
from mixfed.algorithms.fedavg import fedadam, fedavg, fedprox
from mixfed.algorithms.feddle.search import Search, feddle
from mixfed.algorithms.local_global import local_global
from mixfed.algorithms.mixed import gradient_1way, gradient_2way, parallel
from mixfed.algorithms.registry import ALGORITHMS, Setup
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import optim
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import Dropouts, HalfNormal
from mixfed.core.loop import Result, run
from mixfed.core.model import Model
from mixfed.core.private import PrivateStore
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.evaluate.metrics import evaluator
from mixfed.transforms import compress, quantize, top_k
from mixfed.transforms.rows.exchange import exchange_rows
from tests.problems import blobs, small_mlp, small_table

FEDERATED, CENTRAL, TEST = blobs()
ROUNDS = 6


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


ROWS: dict[str, Callable[[], Algorithm]] = {name: registered(name) for name in ALGORITHMS} | {
    "fedavg, momentum clients": on(lambda s: fedavg(s.client), optim.sgd(0.05, momentum=0.9, nesterov=True)),
    "fedavg, decayed and clipped": on(
        lambda s: fedavg(LocalTrainer(s.client.model, optim.sgd(0.2, decay=0.9), s.client.batching, clip=0.5))
    ),
    "fedavg, weight decay": on(lambda s: fedavg(s.client), optim.sgd(0.1, weight_decay=0.01)),
    "fedavg, adam clients": on(lambda s: fedavg(s.client), optim.adam(0.02)),
    "fedavg, adagrad clients": on(lambda s: fedavg(s.client), optim.adagrad(0.1)),
    "fedavg, yogi clients": on(lambda s: fedavg(s.client), optim.yogi(0.02)),
    "local, adam clients": on(lambda s: local_only(s.client), optim.adam(0.02)),
    "gradient_2way, momentum clients": on(
        lambda s: gradient_2way(s.population(), s.central_source()), optim.sgd(0.02, momentum=0.9)
    ),
    "gradient_2way, adam at the merge": on(
        lambda s: gradient_2way(s.population(), s.central_source(), merge=optim.adam(0.05))
    ),
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
    "fedavg, head global, warm start": on(lambda s: local_global(fedavg(s.client), head, warm_start=3)),
    "fedprox, first layer global": on(lambda s: local_global(fedprox(s.client, mu=0.1), lambda n: not head(n))),
    "fedadam, head global": on(lambda s: local_global(fedadam(s.client, learning_rate=0.05), head)),
    "parallel, head global": on(lambda s: local_global(parallel(s.population(), s.central_source()), head)),
    "gradient_1way, head global": on(lambda s: local_global(gradient_1way(s.population(), s.central_source()), head)),
    "gradient_2way, head global": on(lambda s: local_global(gradient_2way(s.population(), s.central_source()), head)),
    "fedasync, head global": on(lambda s: local_global(ALGORITHMS["fedasync"].make(s), head)),
    "fedbuff, head global, warm start": on(lambda s: local_global(ALGORITHMS["fedbuff"].make(s), head, warm_start=3)),
    "ca2fl, head global, warm start": on(lambda s: local_global(ALGORITHMS["ca2fl"].make(s), head, warm_start=3)),
    "hfcl, head global": on(lambda s: local_global(ALGORITHMS["hfcl"].make(s), head)),
    "feddle, head global, warm start": on(lambda s: local_global(ALGORITHMS["feddle"].make(s), head, warm_start=3)),
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


def train(algorithm: Algorithm, executor: str = "loop", rounds: int = ROUNDS, **options: object) -> Result:
    backend = Simulator(
        executor, **{"threads": 2} | {k: options.pop(k) for k in ("threads", "chunk", "memory") if k in options}
    )
    return run(
        algorithm,
        FEDERATED,
        central=CENTRAL,
        rounds=rounds,
        cohort=7,
        seed=3,
        backend=backend,
        **({"evaluate": evaluator(algorithm.model, TEST, personal=algorithm.personal)} | options),
    )


def learnt(result: Result) -> Params:
    """Everything that was learnt: the common model and every client's own."""
    assert result.privates is not None
    own = {
        f"{client}/{part}/{n}": x
        for client, private in result.privates.items("clients")
        for part, leaves in private.items()
        for n, x in leaves.items()
    }
    return result.params | own


def assert_close(a: Result, b: Result, tolerance: float) -> None:
    left, right = learnt(a), learnt(b)
    assert left.keys() == right.keys()
    for name, x in left.items():
        torch.testing.assert_close(x, right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def test_the_table_has_every_algorithm() -> None:
    assert set(ALGORITHMS) <= set(ROWS)


MIXED = ("parallel", "gradient", "example")


@pytest.mark.parametrize("row", ROWS)
def test_learns(row: str) -> None:
    """The loss falls on what the algorithm trains on: the clients' data, the centre's, or, where it mixes, both."""
    algorithm = ROWS[row]()
    seen = TEST if row.startswith(MIXED) else CENTRAL if row == "center" else FEDERATED.pooled()
    evaluate = evaluator(algorithm.model, seen, personal=algorithm.personal)
    after = train(algorithm, rounds=30, evaluate=evaluate).metrics["loss"]
    before = evaluator(algorithm.model, seen)(algorithm.model.initial(), PrivateStore(dict))["loss"]
    assert after < 0.8 * before


@pytest.mark.parametrize("row", ROWS)
def test_executors_agree(row: str) -> None:
    tolerance = 2e-5 if "adam" in row or "yogi" in row or "adagrad" in row else 2e-6
    loop = train(ROWS[row](), "loop", threads=1)
    if "quantis" in row or "bit" in row or "sparse" in row:
        # A coordinate on the edge between two levels may fall to either side after round-off: compare one round.
        assert_close(train(ROWS[row](), "loop", rounds=1), train(ROWS[row](), "vmap", rounds=1), 2e-5)
        return
    assert_close(loop, train(ROWS[row](), "loop", threads=3), tolerance)
    assert_close(loop, train(ROWS[row](), "vmap", chunk=3), tolerance)
    whole = train(ROWS[row](), "vmap", chunk=100, threads=1)
    assert_close(loop, whole, tolerance)
    assert loop.ledger == whole.ledger


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("row", ROWS)
def test_resumed_is_bit_identical(row: str, executor: str, tmp_path: Path) -> None:
    straight = train(ROWS[row](), executor, checkpoints=Checkpoints(tmp_path / "a", every=2))
    train(ROWS[row](), executor, rounds=3, checkpoints=Checkpoints(tmp_path / "b", every=1))
    resumed = train(ROWS[row](), executor, checkpoints=Checkpoints(tmp_path / "b", every=1), resume=True)
    a, b = learnt(straight), learnt(resumed)
    assert a.keys() == b.keys()
    assert all(torch.equal(x, b[name]) for name, x in a.items())
    assert straight.ledger == resumed.ledger
    assert straight.history == resumed.history


LATE = Schedule(4, delays=Dropouts(HalfNormal(1.5), 0.05), late="use", patience=6)
REFILLED = Schedule(3, delays=HalfNormal(1.0), concurrency=5, late="use")


@pytest.mark.parametrize("schedule", [LATE, REFILLED], ids=["late", "refilled"])
@pytest.mark.parametrize("row", ROWS)
def test_resumed_with_jobs_in_flight_is_bit_identical(row: str, schedule: Schedule, tmp_path: Path) -> None:
    straight = train(ROWS[row](), schedule=schedule, checkpoints=Checkpoints(tmp_path / "a", every=2))
    train(ROWS[row](), rounds=3, schedule=schedule, checkpoints=Checkpoints(tmp_path / "b", every=1))
    resumed = train(ROWS[row](), schedule=schedule, checkpoints=Checkpoints(tmp_path / "b", every=1), resume=True)
    a, b = learnt(straight), learnt(resumed)
    assert a.keys() == b.keys()
    assert all(torch.equal(x, b[name]) for name, x in a.items())
    assert straight.ledger == resumed.ledger
    assert straight.history == resumed.history


@pytest.mark.parametrize("row", ROWS)
def test_a_seed_decides_everything(row: str) -> None:
    algorithm = ROWS[row]()
    first, second = train(algorithm), train(ROWS[row]())
    assert all(torch.equal(x, learnt(second)[n]) for n, x in learnt(first).items())
    other = run(algorithm, FEDERATED, central=CENTRAL, rounds=ROUNDS, cohort=7, seed=4, backend=Simulator("loop"))
    mine = learnt(first)
    assert any(n not in mine or not torch.equal(x, mine[n]) for n, x in learnt(other).items())


@pytest.mark.parametrize("row", ROWS)
def test_inputs_are_left_alone(row: str) -> None:
    algorithm = ROWS[row]()
    before = {n: x.clone() for n, x in algorithm.model.initial().items()}
    train(algorithm)
    assert all(torch.equal(x, before[n]) for n, x in algorithm.model.initial().items())
