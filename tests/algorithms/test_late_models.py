"""Models with statistics or frozen parameters under delay: what they end with, and that a resumed run is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mixfed.algorithms.asynchronous import ca2fl, fedasync, fedbuff
from mixfed.algorithms.fedavg import fedadam
from mixfed.algorithms.feddle.guidance import Head
from mixfed.algorithms.feddle.search import Search, feddle
from mixfed.algorithms.hybrid import fed_ft, feddf, hfcl
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import HalfNormal
from mixfed.core.loop import Result
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import adam, sgd
from mixfed.core.private import PrivateStore
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.evaluate.metrics import evaluator
from tests.core.helpers import clients

DATA, CENTRAL = clients([8] * 10), clients([24], seed=1).pooled()
ROUNDS, BATCHING = 8, Batching(8, steps=3)


def normalised(policy: Any) -> Model:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    return Model(network, cross_entropy, buffers=policy)


METHODS: dict[str, Callable[[LocalTrainer, LocalTrainer], Algorithm]] = {
    "fedasync": lambda local, centre: fedasync(local),
    "ca2fl": lambda local, centre: ca2fl(local, buffer=3),
    "fed_ft": lambda local, centre: fed_ft(fedbuff(local, buffer=0), centre),
    "hfcl": lambda local, centre: hfcl(fedbuff(local, buffer=0), centre),
    "feddf": lambda local, centre: feddf(local, BATCHING),
    "feddle": lambda local, centre: feddle(local, Search(BATCHING, learning_rate=0.01), atlas=6),
    "feddle, out of domain": lambda local, centre: feddle(
        local, Search(BATCHING, "out_of_domain", regularisation=0.01, head=Head(steps=3)), atlas=6
    ),
    "feddle, falling back on fedadam": lambda local, centre: feddle(
        local, Search(BATCHING), atlas=6, fallback=fedadam(local)
    ),
}


def trained(method: str, model: Model, rounds: int = ROUNDS, **options: Any) -> Result:
    local = LocalTrainer(model, sgd(0.1), Batching(4, epochs=2))
    return run(
        METHODS[method](local, LocalTrainer(model, adam(0.01), BATCHING)),
        DATA,
        central=CENTRAL,
        rounds=rounds,
        seed=3,
        schedule=Schedule(4, delays=HalfNormal(1.5)),
        backend=Simulator("loop", threads=1),
        evaluate=evaluator(model, DATA.pooled()),
        **options,
    )


def assert_resumes(method: str, make: Callable[[], Model], folder: Path) -> Result:
    straight = trained(method, make())
    trained(method, make(), 4, checkpoints=Checkpoints(folder))
    resumed = trained(method, make(), checkpoints=Checkpoints(folder), resume=True)
    assert straight.params.keys() == resumed.params.keys()
    assert all(torch.equal(x, resumed.params[n]) for n, x in straight.params.items())
    assert straight.history == resumed.history
    return straight


@pytest.mark.parametrize("policy", ["average", "private", "server"])
@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_under_delay(method: str, policy: str, tmp_path: Path) -> None:
    """Averaged statistics follow the clients', the server's own stay unless it trains the model, and all are usable."""
    result = assert_resumes(method, lambda: normalised(policy), tmp_path)
    start = normalised(policy).initial()
    moved = not torch.equal(result.params["1.running_mean"], start["1.running_mean"])
    assert moved == (policy == "average" or method in ("fed_ft", "feddf"))
    assert bool((result.params["1.running_var"] > 0).all())
    before = evaluator(normalised(policy), DATA.pooled())(start, PrivateStore(dict))["loss"]
    assert result.metrics["loss"] < 1.5 * before


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it, and a head, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 6)
        self.lora_a, self.lora_b = nn.Linear(3, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 2)
        nn.init.zeros_(self.lora_b.weight)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(torch.relu(self.body(x) + self.lora_b(self.lora_a(x))))
        return answer


@pytest.mark.parametrize("method", [name for name in METHODS if "feddle" in name])
def test_frozen_parameters_are_no_part_of_the_anchors(method: str, tmp_path: Path) -> None:
    """2·3 + 6·2 of the adapter and 2·6 + 2 of the head train and travel, and anchors are as long."""
    module = Adapted()
    frozen = module.body.weight.clone()
    result = assert_resumes(method, lambda: Model(module, cross_entropy), tmp_path)
    assert set(result.params) == {"lora_a.weight", "lora_b.weight", "head.weight", "head.bias"}
    assert result.state["atlas"]["width"] == 6 + 12 + 14
    assert bool(result.params["lora_b.weight"].abs().max() > 0)
    assert torch.equal(module.body.weight, frozen)
    assert result.ledger["bytes_down"] % (4 * 32) == result.ledger["bytes_up"] % (4 * 32) == 0
