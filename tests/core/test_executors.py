"""How a cohort is run does not change what comes out, and ``auto`` says what it chose."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mixfed.algorithms.asynchronous import fedbuff
from mixfed.backends.run import run
from mixfed.backends.simulator import timing
from mixfed.backends.simulator.choice import Chooser
from mixfed.backends.simulator.engine import Simulator
from mixfed.backends.simulator.execution import WHOLE, Execution, Record
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches, Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import Scripted
from mixfed.core.loop import Result
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.schedule import Schedule, sample_cohort
from mixfed.core.train import LocalTrainer
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.models.networks import CharacterGRU, cnn, mlp
from tests.core.helpers import assert_close, assert_equal, averaging, clients, train


def model(make: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(make(), cross_entropy)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 2))


def text() -> FederatedData:
    draw = np.random.default_rng(0)
    return FederatedData.from_datasets(
        [{"x": draw.integers(0, 5, (n, 4)), "y": draw.integers(0, 5, (n, 4))} for n in (3, 5, 4)]
    )


class Choosy(nn.Linear):
    """A layer whose way depends on its input, which torch.vmap cannot follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else 2 * x)


RAGGED = [3, 9, 5, 1, 8]
PROBLEMS: dict[str, tuple[Callable[[], nn.Module], FederatedData]] = {
    "mlp": (lambda: mlp(3, 2, (6,)), clients(RAGGED)),
    "cnn": (lambda: cnn(2, 6, 2, (3, 4), 5), clients(RAGGED, (2, 6, 6))),
    "gru": (lambda: CharacterGRU(5, 3, 4), text()),
    "batch norm, whole batches": (normalised, clients([8, 4, 4, 12, 8], (1, 6, 6))),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_executors_chunks_and_threads_agree(problem: str) -> None:
    make, data = PROBLEMS[problem]
    loop = train(averaging(model(make)), data, "loop")
    assert_equal(train(averaging(model(make)), data, "loop").params, loop.params)
    ways = [
        ("loop", {"threads": 3}),
        ("vmap", {"chunk": 2}),
        ("vmap", {"chunk": 5}),
        ("vmap", {"chunk": 1, "threads": 2}),
    ]
    for executor, options in ways:
        other = train(averaging(model(make)), data, executor, **options)
        assert_close(other.params, loop.params, 5e-6)
        assert other.ledger == loop.ledger


@pytest.mark.parametrize("channels", [1, 2])
def test_convolutions_run_in_channels_last(channels: int) -> None:
    """The loop hands images and kernels over in the layout that CPU convolutions like, and they keep it."""
    seen: set[bool] = set()

    def forward(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if module.training and len(batch["x"]) > 3:  # not the ledger's own trials
            tensors = (batch["x"], module[0].weight, module[0](batch["x"]))
            seen.update(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
        return module(batch["x"])

    convolutional = Model(cnn(channels, 6, 2, (3, 4), 5), cross_entropy, forward=forward)
    train(averaging(convolutional), clients([4, 8], (channels, 6, 6)))
    assert seen == {True}


@pytest.mark.parametrize(("memory", "most"), [(1, 1), (1 << 30, 5)])
def test_memory_bounds_the_chunk(memory: int, most: int) -> None:
    """A budget of one byte leaves chunks of one client, a large one takes the cohort whole, and the numbers stay."""
    make, data = PROBLEMS["mlp"]
    algorithm, chunks = chunked(averaging(model(make)))
    found = train(algorithm, data, "vmap", memory=memory)
    assert max(chunks) == most
    assert_close(found.params, train(averaging(model(make)), data, "loop").params, 5e-6)


def test_memory_also_bounds_later_cohorts() -> None:
    """One large client makes every client of its chunk large: that cohort is cut into smaller chunks."""
    sizes = [2] * 29 + [500]
    drawn = [sample_cohort(5, r, "clients", 30, 15) for r in range(6)]
    assert [29 in cohort for cohort in drawn] != [True] * 6
    assert 29 not in drawn[0]
    algorithm = averaging(model(lambda: mlp(3, 2, (6,))), Batching(0, steps=1))
    largest: list[int] = []
    inner = algorithm.client

    def client(message, private, batches):  # type: ignore[no-untyped-def]
        examples = batches.fields["x"].shape[1]
        largest.append(examples * chunk_of(batches.fields["x"]))
        return inner(message, private, batches)

    train(replace(algorithm, client=client), clients(sizes), "vmap", rounds=6, cohort=15, memory=40_000)
    assert 500 <= max(largest) <= 1000


@pytest.mark.parametrize(("threads", "expected"), [(1, [3, 3, 2]), (2, [2, 2, 2, 2])])
def test_a_block_of_memory_bounds_the_chunk_and_threads_share_alike(
    monkeypatch: pytest.MonkeyPatch, threads: int, expected: list[int]
) -> None:
    """The largest leaf has 18 numbers of 4 bytes, and of 8 clients 3 fit: two threads have two chunks each."""
    monkeypatch.setattr("mixfed.backends.simulator.chunks.REUSED", 3 * 18 * 4)
    algorithm, chunks = chunked(averaging(model(lambda: mlp(3, 2, (6,)))))
    train(algorithm, clients([4] * 8), "vmap", rounds=1, threads=threads)
    assert chunks == expected


def chunked(algorithm: Algorithm) -> tuple[Algorithm, list[int]]:
    """The algorithm, and how many clients each of its chunks under vmap has."""
    chunks: list[int] = []

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        if batches.vectorised:
            chunks.append(chunk_of(batches.fields["x"]))
        return algorithm.client(message, private, batches)

    return replace(algorithm, client=client), chunks


def chunk_of(x: torch.Tensor) -> int:
    """How many clients a tensor inside vmap stands for."""
    return torch._C._functorch.get_unwrapped(x).shape[0] if torch._C._functorch.is_batchedtensor(x) else 1


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of any length are timed, and every execution on all clients."""
    monkeypatch.setattr(timing, "FIRST", math.inf)
    monkeypatch.setattr(timing, "HOPELESS", math.inf)
    monkeypatch.setattr(timing, "LOST", math.inf)


@pytest.mark.usefixtures("timed")
def test_auto_falls_back_where_vmap_cannot_run() -> None:
    told: list[str] = []
    auto = train(averaging(model(lambda: Choosy(3, 2))), clients(RAGGED), "auto", say=told.append)
    loop = train(averaging(model(lambda: Choosy(3, 2))), clients(RAGGED), "loop")
    assert_equal(auto.params, loop.params)
    assert "vmap cannot run this model" in told[0]
    assert told[1].startswith("Executor: loop")


def test_vmap_that_cannot_run_is_one_sentence() -> None:
    with pytest.raises(InputError, match=r"^The vmap executor cannot run this model: .*; choose loop\.$"):
        train(averaging(model(lambda: Choosy(3, 2))), clients(RAGGED), "vmap")


@pytest.mark.parametrize("fastest", ["loop", "vmap"])
@pytest.mark.usefixtures("timed")
def test_auto_says_what_it_chose_and_runs_that(fastest: str) -> None:
    """Work by the other executor is made to take long: what is said is what is run, and it is said once."""
    make, data = PROBLEMS["mlp"]
    base, told, ran = averaging(model(make)), [], []

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        ran.append("vmap" if batches.vectorised else "loop")
        if told == [] and ran[-1] != fastest:
            time.sleep(0.02)
        return base.client(message, private, batches)

    train(replace(base, client=client), data, "auto", rounds=1, say=lambda said: (told.append(said), ran.clear()))
    assert len(told) == 1
    assert told[0].startswith(f"Executor: {fastest}")
    assert set(ran) == {fastest}


@pytest.mark.usefixtures("timed")
def test_auto_says_what_it_chose_and_can_be_made_to_choose_it_again() -> None:
    make, data = PROBLEMS["mlp"]
    told: list[str] = []
    simulator = Simulator("auto", say=told.append)
    first = run(averaging(model(make)), data, rounds=2, cohort=len(data), seed=5, backend=simulator)
    (chosen,) = simulator.chooser.chosen().values()
    assert len(told) == 1
    assert told[0].startswith(f"Executor: {Execution.parsed(chosen)}; ")
    again = Simulator("auto", chosen={"clients": chosen}, say=told.append)
    second = run(averaging(model(make)), data, rounds=2, cohort=len(data), seed=5, backend=again)
    assert_equal(first.params, second.params)
    assert again.chooser.chosen() == {"clients": chosen}
    assert "as in the run that is repeated" in told[1]
    other = "loop chunk=0 threads=1 cores=1" if chosen.startswith("vmap") else "vmap chunk=2 threads=1 cores=1"
    different = Simulator("auto", chosen={"clients": other})
    run(averaging(model(make)), data, rounds=1, cohort=len(data), seed=5, backend=different)
    assert different.chooser.chosen() == {"clients": other}


@pytest.mark.parametrize("text", ["", "fast", "loop chunk=3 threads=1 cores=1", "vmap chunk=0 threads=1 cores=1"])
def test_an_execution_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no execution"):
        Simulator("auto", chosen={"clients": text})


@pytest.mark.usefixtures("timed")
def test_a_resumed_run_keeps_its_executor(tmp_path: Path) -> None:
    """Even on a machine that might now find another one faster: nothing is timed again."""
    make, data = PROBLEMS["mlp"]
    told: list[str] = []

    def go(rounds: int) -> Simulator:
        simulator = Simulator("auto", say=told.append)
        how = {"checkpoints": Checkpoints(tmp_path), "resume": True, "backend": simulator}
        run(averaging(model(make)), data, rounds=rounds, cohort=len(data), **how)
        return simulator

    assert go(2).chooser.chosen() == go(4).chooser.chosen()
    assert len(told) == 1


@pytest.mark.usefixtures("timed")
def test_timing_leaves_no_trace() -> None:
    """What auto runs to take the time is thrown away: parameters and ledger are those of the chosen executor."""
    make, data = PROBLEMS["batch norm, whole batches"]
    simulator = Simulator("auto", threads=1)
    auto = run(averaging(model(make)), data, rounds=2, cohort=len(data), seed=5, backend=simulator)
    (chosen,) = simulator.chooser.chosen().values()
    plain = train(averaging(model(make)), data, chosen.split()[0])
    assert_equal(auto.params, plain.params)
    assert auto.ledger == plain.ledger


def test_auto_with_one_client() -> None:
    told: list[str] = []
    train(averaging(model(lambda: mlp(3, 2))), clients([5]), "auto", say=told.append)
    assert "loop" in told[0]


@pytest.mark.parametrize(
    ("executor", "options"), [("fast", {}), ("loop", {"threads": 0}), ("vmap", {"chunk": 0}), ("vmap", {"memory": 0})]
)
def test_refusals(executor: str, options: dict[str, int]) -> None:
    with pytest.raises(InputError):
        Simulator(executor, **options)


def test_a_simulator_can_run_again() -> None:
    """Nothing of the first run is left in the second, even with another model."""
    simulator = Simulator("vmap", threads=2)
    big = averaging(model(lambda: mlp(3, 2, (9,))), optimizer=sgd(0.3))
    run(big, clients([4] * 8), rounds=1, cohort=8, backend=simulator)
    make, data = PROBLEMS["mlp"]
    again = run(averaging(model(make)), data, rounds=2, cohort=5, seed=5, backend=simulator)
    assert_equal(again.params, train(averaging(model(make)), data, "vmap", threads=2).params)


def test_a_cohort_of_one_runs_by_loop_also_where_vmap_was_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Round 0: four clients. Round 1: three of four. Round 2: those three again, and the one of round 1 by itself."""
    base = fedbuff(LocalTrainer(model(lambda: mlp(3, 2, (6,))), sgd(0.1), Batching(4, steps=1)), buffer=0)
    algorithm, chunks = chunked(base)
    monkeypatch.setattr(Chooser, "_choose", lambda *_: Record(Execution("vmap", WHOLE, 1)))

    def trained(rounds: int = 3, **options: Any) -> Result:
        schedule = Schedule(4, delays=Scripted({(1, 2): 1.0}))
        backend = Simulator("auto", threads=1)
        return run(
            replace(algorithm, lateness=replace(base.lateness, same_in_every_round=False)),
            clients([8] * 4),
            rounds=rounds,
            schedule=schedule,
            backend=backend,
            **options,
        )

    straight = trained()
    assert chunks == [4, 3, 3]
    trained(2, checkpoints=Checkpoints(tmp_path))
    assert_equal(straight.params, trained(checkpoints=Checkpoints(tmp_path), resume=True).params)


def test_without_the_internals_of_pytorch_clients_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mixfed.models.vmap.MISSING", "PyTorch 9 lacks what this needs of its internals")
    make, data = PROBLEMS["mlp"]
    told: list[str] = []
    auto = train(averaging(model(make)), data, "auto", say=told.append)
    assert_equal(auto.params, train(averaging(model(make)), data, "loop").params)
    assert "PyTorch 9 lacks" in told[0]
    with pytest.raises(InputError, match=r"PyTorch 9 lacks .*; choose loop"):
        train(averaging(model(make)), data, "vmap")
