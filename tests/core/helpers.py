"""What the tests of the core share: random clients, one FedAvg run, and comparison of parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mixfed.algorithms.fedavg import fedavg
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.loop import Result
from mixfed.core.model import Model
from mixfed.core.optim import Optimizer, sgd
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.data.store import FederatedData

SIMULATOR = ("threads", "chunk", "memory", "say", "private_folder")


def clients(sizes: list[int], shape: tuple[int, ...] = (3,), classes: int = 2, seed: int = 0) -> FederatedData:
    """Clients of these sizes with random examples and labels."""
    draw = np.random.default_rng(seed)
    return FederatedData.from_datasets(
        [{"x": draw.normal(size=(n, *shape)).astype(np.float32), "y": draw.integers(0, classes, n)} for n in sizes]
    )


def averaging(model: Model, batching: Batching | None = None, optimizer: Optimizer | None = None) -> Algorithm:
    return fedavg(LocalTrainer(model, optimizer or sgd(0.1), batching or Batching(4, epochs=2)))


def train(algorithm: Algorithm, data: Any, executor: str = "loop", rounds: int = 2, **options: Any) -> Result:
    """A run with every client in the cohort, unless told otherwise."""
    simulator = {"threads": 1} | {name: options.pop(name) for name in SIMULATOR if name in options}
    options = {"cohort": len(data), "seed": 5} | options
    return run(algorithm, data, rounds=rounds, backend=Simulator(executor, **simulator), **options)


def assert_close(a: Params, b: Params, tolerance: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        torch.testing.assert_close(x, b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_equal(a: Params, b: Params) -> None:
    assert a.keys() == b.keys()
    assert [name for name, x in a.items() if not torch.equal(x, b[name])] == []
