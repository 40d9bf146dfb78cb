"""The cost of a round follows the cohort in time, the chunk in memory, and the population in neither."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches, Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.schedule import sample_cohort
from mixfed.data.store import FederatedData
from mixfed.models import vmap
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


@pytest.mark.parametrize(("uploads", "most"), [("sum", 30), ("each", 3)])
def test_a_chunk_in_factors_takes_what_its_factors_take(uploads: Literal["sum", "each"], most: int) -> None:
    """A weight of 200 × 200 numbers is 480 kB in three copies; three examples of 400 numbers are 14 kB, and their data
    10 kB. Where each upload is wanted, the weights themselves are made in the end."""
    torch.manual_seed(0)
    base = averaging(Model(nn.Linear(200, 200, bias=False), cross_entropy), Batching(3, steps=1))
    chunks: list[int] = []

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        if batches.vectorised:
            chunks.append(len(vmap.made_of(batches.key)[0]))
        return base.client(message, private, batches)

    algorithm = replace(base, client=client, uploads=uploads)
    train(algorithm, clients([3] * 60, (200,)), "factored", rounds=1, memory=1_500_000)
    assert max(chunks) <= 60
    assert most <= max(chunks) < 2 * most + 2


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
