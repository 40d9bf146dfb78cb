"""Cohorts in factors: every algorithm gives the numbers of its clients one after another."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mixfed.algorithms.registry import ALGORITHMS
from mixfed.backends.run import run
from mixfed.backends.simulator import gathered, timing
from mixfed.backends.simulator.engine import Simulator
from mixfed.backends.simulator.factored.factors import Factors
from mixfed.backends.simulator.factored.matrix import Factored
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches, Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import HalfNormal
from mixfed.core.loop import Result
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.schedule import Schedule
from mixfed.models import vmap
from tests.algorithms import test_table
from tests.algorithms.test_table import CENTRAL, FEDERATED, ROWS, learnt, setup
from tests.core.helpers import assert_close, assert_equal, averaging, clients, train

WIDE = 120


def wide(inputs: int = 2, outputs: int = 3) -> Model:
    """The middle layer stays in factors. In double precision round-off is far below any mistake."""
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, outputs)]
    return Model(nn.Sequential(*layers), cross_entropy, dtype=torch.float64)


def made(name: str, **options: int) -> Algorithm:
    return ALGORITHMS[name].make(setup(model=wide()), **options)


def ran(algorithm: Algorithm, executor: str, schedule: Schedule | None = None, rounds: int = 4) -> Result:
    simulator = Simulator(executor, threads=1, chunk=5)
    schedule = schedule or Schedule(len(FEDERATED))
    return run(algorithm, FEDERATED, rounds=rounds, schedule=schedule, central=CENTRAL, backend=simulator)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts matrices in factors ("factors") and those that were made dense ("dense")."""
    found: list[str] = []
    new, dense = Factored.__new__, Factors.dense

    def counted(cls: type, factors: Factors) -> Factored:
        found.append("factors")
        return new(cls, factors)

    def made_dense(self: Factors) -> torch.Tensor:
        found.append("dense")
        return dense(self)

    monkeypatch.setattr(Factored, "__new__", counted)
    monkeypatch.setattr(Factors, "dense", made_dense)
    return found


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_table(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a codec rounds, round-off may decide between two levels, so that one round is compared, and not closely."""
    monkeypatch.setattr(test_table, "small_mlp", wide)
    rounds, tolerance = (1, 2e-5) if ROWS[row].rounds_off else (4, ROWS[row].tolerance)
    alone, together = (ran(ROWS[row].make(), executor, rounds=rounds) for executor in ("loop", "factored"))
    assert_close(learnt(together), learnt(alone), tolerance)
    assert alone.ledger == together.ledger


@pytest.mark.parametrize("name", ["fedbuff", "ca2fl"])
def test_late_clients_of_several_rounds(name: str, met: list[str]) -> None:
    late = Schedule(4, HalfNormal(4.0), late="use")
    alone, together = (ran(made(name, buffer=0), executor, late, 12) for executor in ("loop", "factored"))
    assert_close(together.params, alone.params, 1e-4)
    assert "factors" in met


def test_late_clients_of_several_rounds_are_in_factors_together_with_those_of_their_round() -> None:
    """Clients that start from different models cannot share factors, so that a chunk has those of one round."""
    late, algorithm = Schedule(4, HalfNormal(4.0), late="use"), made("fedbuff", buffer=0)
    stayed: list[bool] = []

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        upload, private = algorithm.client(message, private, batches)
        if batches.vectorised:  # the first one is counted for the ledger, alone
            stayed.append(isinstance(upload.values["delta"]["2.weight"], Factored))
        return upload, private

    ran(replace(algorithm, client=client), "factored", late, 12)
    assert len(stayed) > 12  # more chunks than steps of the server
    assert all(stayed)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "gradient_1way", "gradient_2way", "parallel"])
def test_sums_never_need_a_clients_own_weights(name: str, met: list[str]) -> None:
    ran(made(name), "factored")
    assert "factors" in met
    assert "dense" not in met


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_client_whose_numbers_are_not_finite_is_dropped_alone(bad: float, threads: int) -> None:
    sizes = [4, 2, 6, 3]
    spoilt, algorithm = clients(sizes, (WIDE,)), averaging(wide(WIDE, 2), Batching(3, epochs=2))
    spoilt.arrays["x"][5, 0] = bad  # the second client's
    found = train(algorithm, spoilt, "factored", threads=threads)
    wanted = train(algorithm, spoilt, "loop")
    assert found.dropped == wanted.dropped == 2
    assert_close(found.params, wanted.params, 1e-5)


@pytest.mark.parametrize("leaf", ["2.weight", "2.bias"])
def test_whichever_of_its_leaves_is_not_finite(leaf: str) -> None:
    """A client sends up infinity instead of one leaf, the first in factors or dense. It is the last one of more clients
    than are looked at where their mean is sound."""
    sizes = [*[4, 2, 3] * gathered.SAMPLE, 6]
    algorithm, data = averaging(wide(WIDE, 2), Batching(3, epochs=2)), clients(sizes, (WIDE,))

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        upload, private = algorithm.client(message, private, batches)
        spoilt = torch.where(batches.examples == 12, torch.inf, 1.0)  # the last one's
        delta = upload.values["delta"]
        return Upload({"delta": delta | {leaf: delta[leaf] * spoilt}}, upload.weight), private

    found, wanted = (train(replace(algorithm, client=client), data, executor) for executor in ("factored", "loop"))
    assert found.dropped == wanted.dropped == 2
    assert_close(found.params, wanted.params, 1e-5)


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    data, algorithm = clients([4, 2, 6], (WIDE,)), averaging(wide(WIDE, 2), Batching(3, epochs=2))
    whole = train(algorithm, data, "factored", rounds=4)
    train(algorithm, data, "factored", rounds=2, checkpoints=Checkpoints(tmp_path, every=1))
    rest = train(algorithm, data, "factored", rounds=4, checkpoints=Checkpoints(tmp_path, every=1))
    assert_equal(rest.params, whole.params)


def test_where_nothing_can_be_factored_a_sentence_says_so() -> None:
    said: list[str] = []
    narrow = averaging(Model(nn.Linear(2, 2), cross_entropy), Batching(3, steps=2))
    train(narrow, clients([4] * 3, (2,)), "factored", say=said.append)
    assert said == ["Executor: factored runs these clients as vmap does: no weight is large beside their examples."]
    train(averaging(wide(WIDE, 2), Batching(3, steps=2)), clients([4] * 3, (WIDE,)), "factored", say=said.append)
    assert len(said) == 1


def test_auto_runs_late_clients_that_share_no_start_by_vmap(met: list[str]) -> None:
    late, algorithm = Schedule(4, HalfNormal(4.0), late="use"), made("fedbuff", buffer=0)
    chosen = {"clients": "factored chunk=1073741824 threads=1 cores=1"}
    simulator, chunks = Simulator("auto", threads=1, chosen=chosen), []

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        chunks.append(len(vmap.made_of(batches.key)[0]) if batches.vectorised else 1)
        return algorithm.client(message, private, batches)

    run(replace(algorithm, client=client), FEDERATED, rounds=12, schedule=late, central=CENTRAL, backend=simulator)
    assert "factors" not in met
    assert max(chunks) > 1


def test_auto_times_it_where_a_layer_is_wide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FIRST", math.inf)
    for inputs, offered in ((WIDE, True), (2, False)):
        said: list[str] = []
        model = wide(inputs, 2) if offered else Model(nn.Linear(2, 2), cross_entropy)
        train(averaging(model, Batching(3, steps=2)), clients([4] * 8, (inputs,)), "auto", say=said.append)
        assert any("ms by factored" in sentence for sentence in said) == offered
