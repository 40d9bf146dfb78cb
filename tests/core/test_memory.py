"""The cost of a round follows the cohort in time, the chunk in memory, and the population in neither."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches, Batching
from mixfed.core.schedule import sample_cohort
from mixfed.data.store import FederatedData
from tests.core.helpers import averaging, clients, train
from tests.problems import small_mlp
from tests.work import Work


def watched(algorithm: Algorithm) -> tuple[Algorithm, list[int]]:
    """The algorithm, and how many earlier uploads were still in memory whenever a client began."""
    uploads: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        alive.append(sum(ref() is not None for ref in uploads))
        upload, private = algorithm.client(message, private, batches)
        uploads.append(weakref.ref(upload.values["delta"]["0.weight"]))
        return upload, private

    return replace(algorithm, client=client), alive


@pytest.mark.parametrize(("executor", "chunk"), [("loop", None), ("vmap", 4)])
def test_sums_are_formed_as_uploads_come(executor: str, chunk: int | None) -> None:
    algorithm, alive = watched(averaging(small_mlp()))
    train(algorithm, clients([3] * 40, (2,), 3), executor, rounds=1, chunk=chunk)
    assert len(alive) >= 10
    assert max(alive) <= 1


def test_each_keeps_every_upload() -> None:
    """The other way round, so that the test above is known to see what it looks for."""
    base = averaging(small_mlp())
    algorithm, alive = watched(replace(base, uploads="each"))
    result = train(algorithm, clients([3] * 40, (2,), 3), rounds=1)
    assert max(alive) >= 39
    torch.testing.assert_close(result.params, train(base, clients([3] * 40, (2,), 3), rounds=1).params)


def work_of_rounds(folder: Path, population: int) -> Work:
    """What five rounds on a memory-mapped store take, after one that measures what a step costs."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(2 * population, 2)).astype(np.float32), draw.integers(0, 3, 2 * population)
    FederatedData({"x": x, "y": y}, np.arange(0, 2 * population + 1, 2)).save(folder)
    data = FederatedData.open(folder)
    assert isinstance(data.arrays["x"], np.memmap)
    work = Work()
    run(
        averaging(small_mlp(), Batching(2, steps=2)),
        data,
        rounds=6,
        cohort=50,
        backend=Simulator("loop", threads=1),
        callbacks=[lambda record: work.start() if record.round == 1 else None],
    )
    work.stop()
    return work


def test_a_million_clients_cost_what_a_thousand_cost(tmp_path: Path) -> None:
    """As many calls (but for what is drawn twice), and no memory that grows with the population."""
    few, many = work_of_rounds(tmp_path / "few", 1_000), work_of_rounds(tmp_path / "many", 1_000_000)
    assert many.calls < 1.05 * few.calls
    assert many.bytes < few.bytes + 100_000


def test_cohorts_are_distinct_clients_drawn_fairly() -> None:
    """500 cohorts of 6 out of 20: every client 150 times, ± 5·√(500·0.3·0.7) = 51."""
    cohorts = [sample_cohort(1, r, "clients", 20, 6) for r in range(500)]
    assert all(len(set(c.tolist())) == 6 and sorted(c) == c.tolist() for c in cohorts)
    counts = np.bincount(np.concatenate(cohorts), minlength=20)
    assert np.abs(counts - 150).max() < 51
    assert not np.array_equal(cohorts[0], sample_cohort(2, 0, "clients", 20, 6))
    assert not np.array_equal(cohorts[0], sample_cohort(1, 0, "others", 20, 6))
    assert np.array_equal(sample_cohort(1, 3, "clients", 20, 20), np.arange(20))
