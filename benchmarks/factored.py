"""Where clients in factors pay: ``python benchmarks/factored.py [--widths 32,512] [--clients 10,100]``.

A network width-width-10 is trained by FedAvg on random examples, for every width, number of local examples K·B and
cohort. Each cell has the milliseconds of a round by loop, vmap and factored, what auto picked for a run of ``--rounds``
rounds, what its rounds took beside the fastest of the three, and the share of such a run that it spent on choosing. The
four are run in turns, because a machine's speed drifts, and the best of their rounds counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rounds import Rounds
from torch import nn

import mixfed as mf
from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy

EXECUTORS = ("loop", "vmap", "factored", "auto")


@dataclass
class Runner:
    """Rounds of one executor, and the seconds that they took; the first one has the choice of auto in it."""

    rounds: Rounds
    clients: int
    first: float = 0.0
    took: list[float] = field(default_factory=list)

    def go(self, seconds: float) -> None:
        """Rounds for so long, or one."""
        end = time.perf_counter() + seconds
        while True:
            began = time.perf_counter()
            self.rounds.next(np.arange(self.clients))
            now = time.perf_counter()
            if not self.first:
                self.first = now - began
            else:
                self.took.append(now - began)
            if now >= end:
                return


def runners(width: int, batch: int, steps: int, clients: int, expected: int) -> dict[str, Runner]:
    """A runner for each executor, on the same data."""
    draw, count = np.random.default_rng(0), clients * batch * steps
    x, y = draw.normal(size=(count, width)).astype(np.float32), draw.integers(0, 10, count)
    data = {"clients": mf.FederatedData({"x": x, "y": y}, np.arange(clients + 1) * batch * steps)}
    found = {}
    for executor in EXECUTORS:
        torch.manual_seed(0)
        model = mf.Model(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)), cross_entropy)
        algorithm = mf.fedavg(mf.LocalTrainer(model, mf.sgd(0.1), Batching(batch, steps=steps)))
        found[executor] = Runner(Rounds(algorithm, data, mf.Simulator(executor), expected), clients)
    return found


def cell(width: int, batch: int, steps: int, clients: int, options: argparse.Namespace) -> list[str]:
    """A row of the table."""
    found = runners(width, batch, steps, clients, options.rounds)
    for turn in range(1 + options.turns):
        for runner in found.values():
            runner.go(options.seconds if turn else 0.0)
    best = {name: min(runner.took) for name, runner in found.items()}
    fastest = min(best[name] for name in EXECUTORS[:3])
    (picked,) = found["auto"].rounds.simulator.chooser.chosen().values()
    choosing = (found["auto"].first - best["auto"]) / (options.rounds * best["auto"])
    milliseconds = [f"{1000 * best[name]:.1f}" for name in EXECUTORS[:3]]
    shape = [str(width), str(batch * steps), str(clients)]
    return [*shape, *milliseconds, picked.split()[0], f"{best['auto'] / fastest:.2f}", f"{choosing:.1%}"]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--widths", type=numbers, default=[32, 128, 512, 1024], help="inputs and hidden units")
    parser.add_argument("--steps", type=numbers, default=[1, 4, 20], help="local steps on batches of five")
    parser.add_argument("--clients", type=numbers, default=[10, 100], help="clients of a cohort")
    parser.add_argument("--rounds", type=int, default=500, help="rounds of the run that auto chooses for")
    parser.add_argument("--turns", type=int, default=3, help="turns of each executor")
    parser.add_argument("--seconds", type=float, default=0.1, help="seconds of a turn, at least one round")
    options = parser.parse_args()
    table = Table(title="Milliseconds of a round", title_justify="left")
    for heading in ("width", "K·B", "clients", "loop", "vmap", "factored", "auto picks", "auto/best", "choosing"):
        table.add_column(heading, justify="right", no_wrap=True)
    for width in options.widths:
        for steps in options.steps:
            for clients in options.clients:
                table.add_row(*cell(width, 5, steps, clients, options))
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
