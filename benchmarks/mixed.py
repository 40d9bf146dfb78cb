"""What mixing costs: a round of each mixed method against its halves, measured in turn in one process.

Parallel Training is to cost at most the sum of a FedAvg round and of its central steps alone; 1-way transfer adds one
central gradient to FedAvg.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import mixfed as mf

CLIENTS, EXAMPLES, FEATURES, COHORT = 500, 20, 784, 50


def algorithms() -> tuple[dict[str, mf.Algorithm], mf.FederatedData, mf.CentralData]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = mf.Model(module, mf.cross_entropy)
    draw = np.random.default_rng(0)

    def examples(count: int) -> dict[str, np.ndarray]:
        return {"x": draw.random((count, FEATURES), dtype=np.float32), "y": draw.integers(0, 10, count)}

    data = mf.FederatedData(examples(CLIENTS * EXAMPLES), np.arange(CLIENTS + 1) * EXAMPLES)
    clients = mf.LocalTrainer(model, mf.sgd(0.1), mf.Batching(10, steps=5))
    centre = mf.LocalTrainer(model, mf.sgd(0.1), mf.Batching(500, steps=5))
    return (
        {
            "fedavg": mf.fedavg(clients),
            "center": mf.center(centre),
            "parallel": mf.parallel(clients, centre),
            "gradient_1way": mf.gradient_1way(clients, centre),
            "gradient_2way": mf.gradient_2way(clients, centre),
            "example_transfer": mf.example_transfer(clients, ratio=0.5),
        },
        data,
        mf.CentralData(examples(5000)),
    )


def seconds(algorithm: mf.Algorithm, data: mf.FederatedData, central: mf.CentralData, rounds: int) -> float:
    laps = [time.perf_counter()]
    mf.run(
        algorithm,
        data,
        central=central,
        rounds=rounds,
        cohort=COHORT,
        backend=mf.Simulator("vmap"),
        callbacks=[lambda record: laps.append(time.perf_counter())],
    )
    return median(np.diff(laps)[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    methods, data, central = algorithms()
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(given.repeats):  # in turn, so that a slow moment of the machine hits all alike
        for name, algorithm in methods.items():
            times[name].append(seconds(algorithm, data, central, given.rounds))
    found = {name: median(values) for name, values in times.items()}
    halves = found["fedavg"] + found["center"]
    table = Table(title=f"{COHORT} clients, 5 steps of 10; centre 5 steps of 500")
    for heading in ("method", "ms per round", "to FedAvg", "to FedAvg + Center"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, value in found.items():
        table.add_row(name, f"{1000 * value:.1f}", f"{value / found['fedavg']:.2f}", f"{value / halves:.2f}")
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
