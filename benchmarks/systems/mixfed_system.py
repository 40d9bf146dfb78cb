"""mixfed: the library's own algorithm and simulator, driven round by round."""

from __future__ import annotations

import numpy as np
import torch
from clock import Clock
from rounds import Rounds
from torch import Tensor
from workloads import Workload

import mixfed as mf
from mixfed.core.batches import Batching
from mixfed.transforms.rows.exchange import exchange_rows


def bags_and_items(module: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """W4's forward pass with the library's bags of rows, which row exchange reads and writes without their rows."""
    bag, item = batch["left.weight"], batch["right.weight"]
    left = mf.lookups.bag(bag, module.left.weight) / bag.shape[-1]
    return (left * module.right(item[..., 0])).sum(-1)


def work(workload: Workload) -> tuple[mf.Algorithm, dict[str, mf.FederatedData]]:
    """The algorithm of a workload, and its clients."""
    x, y = workload.data()
    parts = {name: x[..., columns] for name, columns in workload.tables.items()} or {"x": x}
    fields = {name: part.flatten(0, 1).numpy() for name, part in (parts | {"y": y}).items()}
    data = {"clients": mf.FederatedData(fields, np.arange(workload.population + 1) * workload.examples)}
    model = mf.Model(
        workload.model(),
        lambda outputs, batch: workload.criterion(outputs, batch["y"]),
        forward=bags_and_items if workload.tables else None,
        tables={name: [name] for name in workload.tables},
    )
    batching = Batching(workload.batch, steps=workload.steps, shuffle=False)
    algorithm = mf.fedavg(mf.LocalTrainer(model, mf.sgd(workload.rate), batching))
    if workload.tables:
        algorithm = exchange_rows(algorithm)
    return algorithm, data


def run(workload: Workload, clock: Clock, cores: int) -> None:
    torch.set_num_threads(cores)
    rounds = Rounds(*work(workload), mf.Simulator(say=print))
    while True:
        rounds.next(np.array(workload.cohort(rounds.number)))
        if not clock.lap(lambda: rounds.state["params"]):
            return
