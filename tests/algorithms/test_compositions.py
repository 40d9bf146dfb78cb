"""Every transform on every algorithm: where the transform is the identity the run is the plain one, and what makes no
sense is refused when it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.feddle.search import Search, feddle
from mixfed.algorithms.hybrid import fed_ft, hfcl
from mixfed.algorithms.local_global import local_global
from mixfed.algorithms.makers import Setup
from mixfed.algorithms.mixed import Population, example_transfer, gradient_1way, gradient_2way
from mixfed.algorithms.registry import ALGORITHMS
from mixfed.backends.loopback import Loopback
from mixfed.backends.run import run
from mixfed.backends.simulator import Simulator
from mixfed.core import optim, tree
from mixfed.core.algorithm import Algorithm, Message, Server, State
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import HalfNormal
from mixfed.core.loop import Result
from mixfed.core.model import Model
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.errors import InputError
from mixfed.transforms import compress, quantize, top_k
from mixfed.transforms.rows.exchange import exchange_rows
from mixfed.transforms.travel import what_travels
from tests.problems import blobs, small_mlp, small_table

FEDERATED, CENTRAL, _ = blobs()
LATE = Schedule(4, delays=HalfNormal(1.5), late="use")
SCHEDULES = {"synchronous": Schedule(5), "late": LATE}


def setup(model: Model, steps: int | None = 3) -> Setup:
    batching = Batching(3, steps=steps, epochs=None if steps else 1)
    centre = LocalTrainer(model, optim.sgd(0.1), Batching(8, steps=2))
    return Setup(LocalTrainer(model, optim.sgd(0.1), batching), optim.sgd(1.0), 5, centre, weights=(0.5, 0.5))


def train(algorithm: Algorithm, schedule: Schedule | None = None, rounds: int = 4) -> Result:
    schedule = schedule or Schedule(5)
    backend = Simulator("loop", threads=1)
    return run(algorithm, FEDERATED, central=CENTRAL, rounds=rounds, seed=2, schedule=schedule, backend=backend)


def learnt(result: Result) -> Params:
    parts = result.privates.items("clients")
    own = {f"{c}/{k}/{n}": x for c, p in parts for k, v in p.items() if not k.startswith("lost:") for n, x in v.items()}
    return result.params | own


def assert_same(a: Result, b: Result, tolerance: float = 1e-6) -> None:
    left, right = learnt(a), learnt(b)
    assert left.keys() == right.keys()
    for name, x in left.items():
        torch.testing.assert_close(x, right[name], rtol=tolerance, atol=tolerance)


def losslessly(algorithm: Algorithm, **options: Any) -> Algorithm:
    """All trees that travel, through a codec that loses nothing."""
    travels = what_travels(algorithm)
    down = {name: top_k(1.0) for source in algorithm.batching for name in travels.down(source)}
    return compress(algorithm, message=down, upload={name: top_k(1.0) for name in travels.up()}, **options)


def head(name: str) -> bool:
    return name.startswith(("2.", "network.2", "sides"))


TRANSFORMS: dict[str, Callable[[Algorithm], Algorithm]] = {
    "compress": losslessly,
    "compress, error feedback": lambda a: losslessly(a, error_feedback=True),
    "all parameters global": lambda a: local_global(a, lambda name: True),
    "rows": exchange_rows,
}
REFUSED = {("rows", "local"), ("rows", "mtl")}
"""What keeps tables on clients cannot exchange their rows."""


@cache
def plain(name: str, schedule: str) -> Result:
    return train(ALGORITHMS[name].make(setup(small_table())), SCHEDULES[schedule], rounds=3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ALGORITHMS])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_that_changes_nothing(transform: str, name: str, schedule: str) -> None:
    algorithm = ALGORITHMS[name].make(setup(small_table()))
    if (transform, name) in REFUSED:
        with pytest.raises(InputError, match="keep the table"):
            TRANSFORMS[transform](algorithm)
        return
    changed = train(TRANSFORMS[transform](algorithm), SCHEDULES[schedule], rounds=3)
    assert_same(plain(name, schedule), changed, 1e-5)


COMPRESSED_BASES: dict[str, Callable[[Setup], Algorithm]] = {
    "fed_ft": lambda s: fed_ft(losslessly(fedavg(s.client), error_feedback=True), s.at_centre()),
    "hfcl": lambda s: hfcl(losslessly(fedavg(s.client), error_feedback=True), s.at_centre(), by_examples=True),
    "feddle": lambda s: feddle(
        s.client, Search(s.at_centre().batching), atlas=9, fallback=losslessly(fedavg(s.client), error_feedback=True)
    ),
}
PLAIN_BASES: dict[str, Callable[[Setup], Algorithm]] = {
    "fed_ft": lambda s: fed_ft(fedavg(s.client), s.at_centre()),
    "hfcl": lambda s: hfcl(fedavg(s.client), s.at_centre(), by_examples=True),
    "feddle": lambda s: feddle(s.client, Search(s.at_centre().batching), atlas=9, fallback=fedavg(s.client)),
}


@pytest.mark.parametrize("schedule", [Schedule(5), LATE], ids=["synchronous", "late"])
@pytest.mark.parametrize("name", PLAIN_BASES)
def test_hybrids_stand_on_a_compressed_base(name: str, schedule: Schedule) -> None:
    plain, compressed = PLAIN_BASES[name](setup(small_mlp())), COMPRESSED_BASES[name](setup(small_mlp()))
    assert_same(train(plain, schedule), train(compressed, schedule))
    outside = losslessly(PLAIN_BASES[name](setup(small_mlp())))
    assert_same(train(plain, schedule), train(outside, schedule))


@pytest.mark.parametrize("warm_start", [0, 2])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_compression_around_a_part_that_stays(warm_start: int, error_feedback: bool) -> None:
    """After a warm start fewer leaves travel; what was lost of the others is kept, and sent no more."""

    def split() -> Algorithm:
        return local_global(fedavg(setup(small_mlp()).client), head, warm_start=warm_start)

    assert_same(train(split()), train(losslessly(split(), error_feedback=error_feedback)))
    lossy = compress(
        split(), message={"params": quantize(8)}, upload={"delta": top_k(0.4)}, error_feedback=error_feedback
    )
    assert all(x.isfinite().all() for x in train(lossy).params.values())


@pytest.mark.parametrize("warm_start", [0, 2])
def test_rows_are_exchanged_around_a_part_that_stays(warm_start: int) -> None:
    def split() -> Algorithm:
        return local_global(fedavg(setup(small_table()).client), head, warm_start=warm_start)

    assert_same(train(split()), train(exchange_rows(split())))
    with pytest.raises(InputError, match="put exchange_rows around local_global"):
        local_global(exchange_rows(fedavg(setup(small_table()).client)), head)
    with pytest.raises(InputError, match="keep the table"):
        exchange_rows(local_global(fedavg(setup(small_table()).client), lambda n: n != "sides.weight"))


NONSENSE: dict[str, tuple[Callable[[Setup], object], str]] = {
    "no such tree goes down": (
        lambda s: compress(fedavg(s.client), message={"gradient": top_k(0.5)}),
        "sends no",
    ),
    "no such tree comes up": (
        lambda s: compress(ALGORITHMS["fedasync"].make(s), upload={"delta": top_k(0.5)}),
        "uploads no 'delta' that could be compressed; it uploads model",
    ),
    "nobody is asked": (lambda s: compress(ALGORITHMS["center"].make(s), upload={"delta": top_k(0.5)}), "nothing"),
    "twice": (lambda s: losslessly(losslessly(fedavg(s.client))), "compressed already"),
    "inside": (lambda s: local_global(losslessly(fedavg(s.client)), head), "put compress around local_global"),
    "nothing stays": (lambda s: local_global(ALGORITHMS["mtl"].make(s), head), "could stay at home"),
    "nothing is sent": (lambda s: local_global(ALGORITHMS["local"].make(s), head), "could stay at home"),
    "no clients": (lambda s: local_global(ALGORITHMS["center"].make(s), head), "has no clients"),
    "a base of itself": (
        lambda s: ALGORITHMS["lg_fedavg"].make(s, base="lg_fedavg"),
        "must be an algorithm that another can be built on",
    ),
    "nothing to merge": (lambda s: ALGORITHMS["feddle"].make(s, fallback="local"), "neither a change nor a model"),
    "no population": (lambda s: ALGORITHMS["feddle"].make(s, fallback="center"), "one population"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_what_makes_no_sense_is_refused_when_it_is_built(case: str) -> None:
    make, told = NONSENSE[case]
    with pytest.raises(InputError, match=told):
        make(setup(small_mlp()))


def test_rows_that_move_by_themselves_need_equal_steps() -> None:
    transferring = gradient_1way(
        setup(small_table(), None).population(), setup(model := small_table()).central_source()
    )
    assert model is not None
    with pytest.raises(InputError, match="give steps instead of epochs"):
        exchange_rows(transferring)


@pytest.mark.parametrize("schedule", [Schedule(5), Schedule(2, delays=HalfNormal(4.0), buffer=3, late="use")])
def test_all_that_was_sent_is_all_that_was_meant_but_for_the_last_loss(schedule: Schedule) -> None:
    """Σ sent = Σ meant − e, also in rounds without a step of the server."""
    local = setup(small_mlp())
    base = gradient_2way(local.population(), local.central_source())
    meant: list[Params] = []

    def broadcast(state: State, server: Server) -> tuple[dict[str, Message], State]:
        messages, state = base.broadcast(state, server)
        meant.append(messages["clients"]["correction"])
        return messages, state

    codec = top_k(0.2)
    small = compress(replace(base, broadcast=broadcast), message={"correction": codec}, error_feedback=True)
    meant.clear()
    sent: list[Params] = []

    def recorded(state: State, server: Server) -> tuple[dict[str, Message], State]:
        messages, state = small.broadcast(state, server)
        sent.append(codec.decode(messages["clients"]["correction"], meant[-1]))
        return messages, state

    result = train(replace(small, broadcast=recorded), schedule, rounds=20)
    lost = result.state["lost"]["clients"]["correction"]
    assert len(sent) == 20
    for name, e in lost.items():
        balance = sum(x[name] for x in sent) - (sum(x[name] for x in meant) - e)
        torch.testing.assert_close(balance, torch.zeros_like(e), rtol=0, atol=1e-5)
    assert float(tree.norm(lost)) > 0


def quantised() -> Algorithm:
    """The model has a bias after its weight, and the alphabet has it before."""
    return compress(fedavg(setup(small_mlp()).client), message={"params": quantize(8)}, error_feedback=True)


def six_sources() -> Algorithm:
    """Sources whose gradients are summed, with names that are not in the order of the alphabet."""
    local = setup(small_mlp())
    return gradient_2way([Population(local.client, name=name) for name in "fbdaec"], local.central_source())


@pytest.mark.parametrize("make", [quantised, six_sources])
def test_resumed_runs_have_their_names_in_the_order_of_before(make: Callable[[], Algorithm], tmp_path: Path) -> None:
    data = {name: blobs(seed=i)[0] for i, name in enumerate("fbdaec")} | {"clients": FEDERATED}

    def go(rounds: int, **options: Any) -> Params:
        backend = Simulator("loop", threads=1)
        algorithm = make()
        held = {name: data[name] for name in algorithm.batching}
        return run(algorithm, held, central=CENTRAL, rounds=rounds, cohort=3, backend=backend, **options).params

    go(3, checkpoints=Checkpoints(tmp_path))
    resumed, whole = go(6, checkpoints=Checkpoints(tmp_path), resume=True), go(6)
    assert all(torch.equal(x, whole[name]) for name, x in resumed.items())


def test_rows_of_central_examples_are_refused_over_bytes() -> None:
    """A client cannot name the rows of examples that it has not received; the simulator knows them."""
    model = small_table()
    on_device = LocalTrainer(model, optim.sgd(0.1), Batching(3, steps=1))
    algorithm = exchange_rows(example_transfer(on_device, ratio=0.5))
    clients, central, _ = blobs(clients=6)
    assert run(algorithm, clients, central=central, rounds=1, cohort=3).rounds == 1
    with pytest.raises(InputError, match="leave out exchange_rows, or use the simulator"):
        run(algorithm, clients, central=central, rounds=1, cohort=3, backend=Loopback())
