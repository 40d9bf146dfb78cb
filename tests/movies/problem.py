"""A small recommendation problem: ragged clients, padding, a client with one example, one that has all items."""

from __future__ import annotations

import numpy as np
import torch

from mixfed.core.batches import Batching
from mixfed.core.losses import hinge
from mixfed.core.model import Model
from mixfed.core.optim import Optimizer, sgd
from mixfed.core.regularisers import spreadout_of
from mixfed.core.train import LocalTrainer
from mixfed.data.store import CentralData, FederatedData
from mixfed.models.recommender import DualEncoder

ITEMS, WIDTH, HISTORY = 23, 4, 5
TABLE = "embedding.weight"


def examples(
    count: int, draw: np.random.Generator, items: int = ITEMS, liked: int | None = None
) -> dict[str, np.ndarray]:
    x = draw.integers(0, items if liked is None else liked, (count, HISTORY))
    x[draw.random(x.shape) < 0.3] = -1
    return {"x": x, "y": draw.integers(0, items if liked is None else liked, count)}


def clients(seed: int = 0) -> FederatedData:
    draw = np.random.default_rng(seed)
    some = [examples(int(n), draw, liked=int(k)) for n, k in zip([1, 4, 9, 2, 7], [3, 8, 20, 5, 11], strict=True)]
    everything = {"x": np.full((ITEMS, HISTORY), -1), "y": np.arange(ITEMS)}
    return FederatedData.from_datasets([*some, everything])


def centre(seed: int = 1) -> CentralData:
    return CentralData(examples(12, np.random.default_rng(seed)))


def model(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    module = DualEncoder(ITEMS, WIDTH)
    return Model(module, hinge, dtype=dtype)


def on_clients(
    of: Model, optimizer: Optimizer | None = None, *, epochs: int | None = None, clip: float | None = None
) -> LocalTrainer:
    batching = Batching(3, epochs=epochs) if epochs else Batching(3, steps=4)
    return LocalTrainer(of, optimizer or sgd(0.3), batching, clip)


def regulariser(of: Model, optimizer: Optimizer | None = None) -> LocalTrainer:
    return LocalTrainer(of, optimizer or sgd(0.3), Batching(1, steps=3), loss=spreadout_of(TABLE, 0.05))
