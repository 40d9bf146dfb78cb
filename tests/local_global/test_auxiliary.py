"""Auxiliary models: private, the same under both executors, and each learns its task."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.local_global import local_global, named
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import adam
from mixfed.core.train import LocalTrainer
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.models.networks import mlp
from mixfed.models.parts import TASKS, cut, summed, with_auxiliary

KINDS = [kind for kind in TASKS if kind != "adversary"]


def images(clients: int = 3, examples: int = 20) -> FederatedData:
    """4 × 4 images that look different in every direction."""
    draw = np.random.default_rng(0)
    n = clients * examples
    y = draw.integers(0, 2, n)
    x = draw.normal(size=(n, 1, 4, 4)).astype(np.float32) * 0.1
    x += np.arange(16, dtype=np.float32).reshape(4, 4) / 8 + y[:, None, None, None]
    return FederatedData.from_arrays({"x": x, "y": y}, np.repeat(np.arange(clients), examples))


def model(kind: str) -> Model:
    torch.manual_seed(0)
    parts = with_auxiliary(
        mlp(16, 2, [16, 8]), torch.zeros(1, 4, 4), kind, layers=1, classes=2, hidden=[16], dropout=0.0
    )
    return Model(parts, summed(cross_entropy, 1.0), forward=lambda m, batch: m(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_executors_agree_and_the_task_is_learnt(kind: str) -> None:
    found = []
    for executor in ("loop", "vmap"):
        network = model(kind)
        trainer = LocalTrainer(network, adam(0.01), Batching(8, epochs=2))
        algorithm = local_global(fedavg(trainer), named(["head."]))
        found.append(run(algorithm, images(), rounds=16, cohort=3, backend=Simulator(executor)))
    for a, b in zip(*(r.privates.items("clients") for r in found), strict=True):  # type: ignore[union-attr]
        for name, x in a[1]["local"].items():
            torch.testing.assert_close(x, b[1]["local"][name], rtol=2e-3, atol=2e-4)
    batch = {n: torch.from_numpy(x) for n, x in images().arrays.items()} | {"key": torch.tensor(5)}
    own = found[0].params | found[0].privates.get("clients", 0)["local"]  # type: ignore[union-attr]
    before, after = (network.outputs(p, batch, training=True)[1].mean() for p in (network.initial(), own))
    assert after < 0.8 * before
    assert network.outputs(own, batch, training=False).shape == (60, 2)


def test_refusals() -> None:
    with pytest.raises(InputError, match="needs square images"):
        with_auxiliary(mlp(6, 2), torch.zeros(6), "rotation", layers=1, classes=2, hidden=[], dropout=0.0)
    with pytest.raises(InputError, match="even number"):
        with_auxiliary(mlp(9, 2), torch.zeros(1, 3, 3), "jigsaw", layers=1, classes=2, hidden=[], dropout=0.0)
    with pytest.raises(InputError, match="is cut after 1 to 1"):
        cut(mlp(4, 2), 2)
    with pytest.raises(InputError, match="sequential"):
        cut(torch.nn.Linear(2, 2), 1)
    with pytest.raises(InputError, match="no auxiliary model"):
        with_auxiliary(mlp(4, 2), torch.zeros(4), "music", layers=1, classes=2, hidden=[], dropout=0.0)
