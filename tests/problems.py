"""Small problems whose answers are known, shared by the tests."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import Optimizer, sgd
from mixfed.core.train import LocalTrainer
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData, FederatedData


class Point(nn.Module):
    """A point w; the loss of an example a is ½·Σ c·(w − a)², so that its gradient is c·(w − a)."""

    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, a: Tensor) -> Tensor:
        return self.w - a


def half_square(outputs: Tensor, batch: Batch) -> Tensor:
    curvature = batch.get("c", torch.ones_like(outputs))
    return 0.5 * (curvature * outputs.square()).sum(-1)


def point(start: list[float]) -> Model:
    return Model(Point(start), half_square, dtype=torch.float64)


def targets(*clients: list[list[float]]) -> FederatedData:
    """One client for each list of examples."""
    return FederatedData.from_datasets([{"x": np.array(c, dtype=np.float64)} for c in clients])


def central(*examples: list[float], curvature: float = 1.0) -> CentralData:
    x = np.array(examples, dtype=np.float64)
    return CentralData.from_arrays({"x": x, "c": np.full_like(x, curvature)})


def trainer(
    model: Model, rate: float, steps: int = 1, batch: int = 0, optimizer: Optimizer | None = None
) -> LocalTrainer:
    return LocalTrainer(model, optimizer or sgd(rate), Batching(batch, steps=steps))


def blobs(clients: int = 12, seed: int = 0) -> tuple[FederatedData, CentralData, CentralData]:
    """Three classes of points in the plane: ragged clients have 0 and 1, the centre has 2, the test set all.

    ``side`` is 0 to the left, 2 to the right and -1 (padding, for a table) far up.
    """
    draw = np.random.default_rng(seed)
    middle = np.array([[2.0, 0.0], [-2.0, 0.0], [0.0, 3.0]])

    def sample(labels: np.ndarray) -> dict[str, np.ndarray]:
        x = (middle[labels] + draw.normal(size=(len(labels), 2))).astype(np.float32)
        return {"x": x, "y": labels, "side": np.where(x[:, 1] > 2, -1, 2 * (x[:, 0] > 0))}

    owners = np.repeat(np.arange(clients), draw.integers(1, 9, clients))
    federated = FederatedData.from_arrays(sample(draw.integers(0, 2, len(owners))), owners)
    return federated, CentralData(sample(np.full(40, 2))), CentralData(sample(draw.integers(0, 3, 200)))


def small_mlp(**options: object) -> Model:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    return Model(module, cross_entropy, **options)  # type: ignore[arg-type]


class WithTable(nn.Module):
    """A small network and a table with a row of logits for every side; of its rows, 1 and 3 are never touched."""

    tables: ClassVar = {"sides.weight": ("side",)}

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        self.sides = nn.Embedding(4, 3)

    def on_batch(self, batch: Batch) -> Tensor:
        logits: Tensor = self.network(batch["x"])
        known = (batch["side"] >= 0).to(logits.dtype)[..., None]
        return logits + known * self.sides(batch["side"].clamp(min=0))


def small_table(**options: object) -> Model:
    torch.manual_seed(0)
    return Model(WithTable(), cross_entropy, **options)  # type: ignore[arg-type]
