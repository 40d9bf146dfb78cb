"""Clients of several rounds that run as one cohort: the same numbers, in fewer pieces of work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from mixfed.algorithms.local_global import local_global
from mixfed.algorithms.registry import ALGORITHMS
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import optim
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches, Batching
from mixfed.core.delays import HalfNormal
from mixfed.core.loop import Result
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from tests.algorithms.test_table import CENTRAL, FEDERATED, head, learnt, setup

LATE = Schedule(4, HalfNormal(4.0))
ROUNDS = 12


def fading() -> Algorithm:
    """A rate that falls from round to round, so that it matters which one a client belongs to."""
    s = setup()
    trainer = LocalTrainer(s.client.model, optim.sgd(0.1, decay=0.5), Batching(3, epochs=2))
    return ALGORITHMS["fedbuff"].make(replace(s, client=trainer), buffer=0)


MADE: dict[str, Callable[[], Algorithm]] = {
    "fedbuff": lambda: ALGORITHMS["fedbuff"].make(setup(), buffer=0),
    "fedasync": lambda: ALGORITHMS["fedasync"].make(setup()),
    "ca2fl": lambda: ALGORITHMS["ca2fl"].make(setup(), buffer=0),
    "feddle": lambda: ALGORITHMS["feddle"].make(setup()),
    "hfcl": lambda: ALGORITHMS["hfcl"].make(setup()),
    "local": lambda: ALGORITHMS["local"].make(setup()),
    "lg": lambda: local_global(ALGORITHMS["fedbuff"].make(setup(), buffer=0), head),
    "lg, warm start": lambda: local_global(ALGORITHMS["fedbuff"].make(setup(), buffer=0), head, warm_start=4),
    "fading": fading,
}


def trained(algorithm: Algorithm, executor: str) -> tuple[Result, int]:
    """The result, and how often the clients' function was called for training."""
    calls = 0

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        nonlocal calls
        calls += int(batches.length > 1)
        return algorithm.client(message, private, batches)

    spied = replace(algorithm, client=client)
    schedule = replace(LATE, late="use")
    simulator = Simulator(executor, threads=1)
    result = run(spied, FEDERATED, rounds=ROUNDS, schedule=schedule, central=CENTRAL, backend=simulator)
    return result, calls


@pytest.mark.parametrize("name", MADE)
def test_the_numbers_are_those_of_one_client_after_another(name: str) -> None:
    (alone, each), (together, chunks) = (trained(MADE[name](), executor) for executor in ("loop", "vmap"))
    a, b = learnt(alone), learnt(together)
    assert a.keys() == b.keys()
    for n, x in a.items():
        torch.testing.assert_close(b[n], x, rtol=2e-4, atol=2e-5)
    assert alone.ledger == together.ledger
    assert each > 1.5 * ROUNDS
    if name in ("fedbuff", "ca2fl", "feddle", "hfcl", "local", "lg"):
        assert chunks <= ROUNDS


def test_an_update_that_is_not_finite_is_dropped_alone() -> None:
    algorithm = MADE["fedbuff"]()

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        upload, private = algorithm.client(message, private, batches)
        broken = torch.where(batches.examples > 2 * float(np.median(FEDERATED.sizes())), torch.nan, 0.0)
        delta = {n: x + broken for n, x in upload.values["delta"].items()}
        return replace(upload, values={"delta": delta}), private

    faulty = replace(algorithm, client=client)
    results = [
        run(faulty, FEDERATED, rounds=ROUNDS, schedule=LATE, backend=Simulator(executor, threads=1))
        for executor in ("loop", "vmap")
    ]
    assert results[0].dropped == results[1].dropped > 0
    for n, x in results[0].params.items():
        torch.testing.assert_close(results[1].params[n], x, rtol=2e-4, atol=2e-5)
