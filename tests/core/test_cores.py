"""Work of small operators has one core; work of large ones has all of them, in threads or in each operator."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from mixfed.backends.simulator import cores, timing
from mixfed.backends.simulator.choice import Chooser
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches, Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.models.bags import bag
from mixfed.models.networks import mlp
from mixfed.transforms.rows.exchange import exchange_rows
from tests.core.helpers import averaging, clients, train

SMALL, WIDE = 4, 12_000
"""Hidden units; a step of the wide one on 8 examples of 300 numbers has five products, of 23 MFLOP on average."""


@pytest.fixture(autouse=True)
def two_cores() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def of_width(width: int) -> Algorithm:
    torch.manual_seed(0)
    return averaging(Model(mlp(300, 2, (width,)), cross_entropy), batching=Batching(8, steps=2))


def where(
    algorithm: Algorithm, executor: str, data: FederatedData | None = None, **options: object
) -> set[tuple[str, int]]:
    """The threads in which clients were trained, each with its cores in an operator."""
    seen: set[tuple[str, int]] = set()

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        if len(batches.fields.get("x", ())) == 2 or batches.vectorised:  # not the single step that is measured
            seen.add((threading.current_thread().name, torch.get_num_threads()))
        return algorithm.client(message, private, batches)

    options = {"threads": None} | options
    train(replace(algorithm, client=client), data or clients([8] * 4, (300,)), executor, rounds=1, **options)
    assert seen
    return seen


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_small_work_is_done_right_here_by_one_core(executor: str) -> None:
    assert where(of_width(SMALL), executor) == {("MainThread", 1)}


def test_large_clients_are_looped_over_by_threads() -> None:
    assert all(name != "MainThread" and inside == 1 for name, inside in where(of_width(WIDE), "loop"))


def test_a_large_cohort_under_vmap_has_all_cores_in_an_operator() -> None:
    assert where(of_width(WIDE), "vmap") == {("MainThread", 2)}


@pytest.mark.parametrize(("words", "inside"), [(30, 1), (300, 2)])
def test_clients_that_look_up_many_rows_have_all_cores_in_an_operator(words: int, inside: int) -> None:
    """Rows of 32 numbers: 4 clients with batches of 8 bags look up 31 or 307 thousand numbers a step."""
    model = Model(
        nn.Embedding(50, 32),
        cross_entropy,
        forward=lambda network, batch: bag(batch["x"], network.weight),
        tables={"weight": ["x"]},
    )
    algorithm = exchange_rows(averaging(model, batching=Batching(8, steps=2)))
    rng = np.random.default_rng(0)
    fields = {"x": rng.integers(0, 50, (32, words)), "y": rng.integers(0, 32, 32)}
    data = FederatedData(fields, np.arange(5) * 8)
    assert where(algorithm, "vmap", data=data) == {("MainThread", inside)}


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_threads_that_were_asked_for_are_taken(executor: str) -> None:
    assert all(name != "MainThread" for name, _ in where(of_width(SMALL), executor, threads=2))
    assert where(of_width(WIDE), executor, threads=1) == {("MainThread", 1)}


def test_one_client_of_a_large_model_has_all_cores() -> None:
    algorithm = of_width(WIDE)
    seen: set[int] = set()

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        if len(batches.fields["x"]) == 2:
            seen.add(torch.get_num_threads())
        return algorithm.client(message, private, batches)

    train(replace(algorithm, client=client), clients([8], (300,)), "loop", rounds=1, threads=None)
    assert seen == {2}


def test_auto_times_one_thread_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where work is large, one thread has all cores in an operator."""

    monkeypatch.setattr(timing, "FIRST", math.inf)
    monkeypatch.setattr(timing, "HOPELESS", math.inf)
    monkeypatch.setattr(timing, "LOST", math.inf)

    def tried(width: int) -> str:
        told: list[str] = []
        where(of_width(width), "auto", say=told.append)
        return told[0]

    small, large = tried(SMALL), tried(WIDE)
    for name in ("loop (one client at a time", "vmap (a chunk for every thread"):
        assert f"{name}, 2 threads)" in small
        assert f"{name}, 1 thread)" in small
        assert f"{name}, 2 threads)" in large
        assert f"{name}, 1 thread on 2 cores)" in large


def test_cores_are_given_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="x"), cores.in_operators(1):
        raise ValueError("x")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("product", "parameters", "expected"),
    [(0, 0, 1), (9e6, 9e5, 1), (35e6, 0, 3), (0, 2.5e6, 2), (1e12, 0, 8), (0, 1e12, 8)],
)
def test_worth(product: float, parameters: float, expected: int) -> None:
    assert cores.worth(product, parameters, 8) == expected


def test_a_chooser_needs_an_executor_that_exists() -> None:
    with pytest.raises(InputError, match="no executor 'fast'"):
        Chooser("fast", None, None, 1, print, {})
