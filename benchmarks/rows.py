"""Does a round follow the rows that clients touch, whatever the size of the table?

100 clients a round, 10 steps of 16 examples with ten items seen and one that follows, tables of 4,000 × 32 and
1,000,000 × 32, FedAvg with plain SGD. A client has seen 170 items one after the other, and an example is eleven in a
row: it touches 170 rows at most, as users of MovieLens do (167 on average). With --scattered every example has eleven
items of its own, so that a client touches 1,400 rows of 4,000 or 1,760 of a million. Compared: row exchange on both
tables, and the whole table on every client under vmap (4,000 rows only: a million rows would take 128 MB a client).

    python benchmarks/rows.py            # two minutes; on a busy machine only the processor time means something

The three are measured in turn, five times, and what counts is the median of the five ratios.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

import numpy as np

from mixfed.cli import ENVIRONMENT

os.environ |= ENVIRONMENT | os.environ  # as the command line has them; read when PyTorch is loaded

import torch
from rounds import Rounds

from mixfed.algorithms.fedavg import fedavg
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import optim
from mixfed.core.batches import Batching
from mixfed.core.losses import hinge
from mixfed.core.model import Model
from mixfed.core.schedule import sample_cohort
from mixfed.core.train import LocalTrainer
from mixfed.data.store import FederatedData
from mixfed.models.recommender import DualEncoder
from mixfed.transforms.rows.exchange import exchange_rows

CLIENTS, COHORT, EXAMPLES, HISTORY, WIDTH = 300, 100, 160, 10, 32


def population(items: int, *, scattered: bool) -> FederatedData:
    draw = np.random.default_rng(0)
    if scattered:
        windows = draw.integers(0, items, (CLIENTS * EXAMPLES, HISTORY + 1))
    else:
        seen = draw.integers(0, items, (CLIENTS, EXAMPLES + HISTORY))
        windows = np.lib.stride_tricks.sliding_window_view(seen, HISTORY + 1, axis=1).reshape(-1, HISTORY + 1)
    fields = {"x": windows[:, :HISTORY].copy(), "y": windows[:, HISTORY].copy()}
    return FederatedData.from_arrays(fields, np.repeat(np.arange(CLIENTS), EXAMPLES))


def seconds(
    items: int, *, by_rows: bool, rounds: int, threads: int | None, scattered: bool = False, chunk: int | None = None
) -> list[tuple[float, float]]:
    """Wall and processor time of each round after two to warm up: sending, clients, averaging, the server's step."""
    torch.manual_seed(0)
    model = Model(DualEncoder(items, WIDTH), hinge)
    algorithm = fedavg(LocalTrainer(model, optim.sgd(0.5), Batching(16, steps=10)))
    if by_rows:
        algorithm = exchange_rows(algorithm, in_place=True)
    data = population(items, scattered=scattered)
    driven = Rounds(algorithm, {"clients": data}, Simulator("vmap", threads=threads, chunk=chunk))
    taken = []
    for number in range(rounds + 2):
        begin, worked = time.perf_counter(), time.process_time()
        driven.next(sample_cohort(0, number, "clients", CLIENTS, COHORT))
        taken.append((time.perf_counter() - begin, time.process_time() - worked))
    return taken[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5, help="how often the three are measured, in turn")
    parser.add_argument("--chunk", type=int, default=None, help="clients at once; a thread's share if left out")
    parser.add_argument("--threads", type=int, default=None, help="side by side; if left out, as many as pay")
    parser.add_argument("--scattered", action="store_true", help="every example has items of its own")
    arguments = parser.parse_args()
    cases = {
        "rows, 4,000 x 32": (4000, True, arguments.rounds),
        "rows, 1,000,000 x 32": (1_000_000, True, arguments.rounds),
        "dense vmap, 4,000 x 32": (4000, False, max(arguments.rounds // 4, 3)),
    }
    how = {"threads": arguments.threads, "scattered": arguments.scattered, "chunk": arguments.chunk}
    runs = [
        {name: seconds(items, by_rows=rows, rounds=rounds, **how) for name, (items, rows, rounds) in cases.items()}
        for _ in range(arguments.repeats)
    ]
    for kind, which in (("wall clock", 0), ("processor time", 1)):
        medians = {name: [median(t[which] for t in run[name]) for run in runs] for name in cases}
        for name, each in medians.items():
            print(f"{kind:15} {name:24} {1000 * median(each):8.1f} ms a round ({_spread(each, 1000, 0)})")
        small, large, dense = medians.values()
        growth = [b / a for a, b in zip(small, large, strict=True)]
        gain = [b / a for a, b in zip(small, dense, strict=True)]
        print(f"{kind:15} a million rows take {median(growth):.2f} times as long ({_spread(growth)}; at most 2 wanted)")
        print(
            f"{kind:15} rows are {median(gain):.1f} times as fast as whole tables ({_spread(gain)}; at least 5 wanted)"
        )


def _spread(values: list[float], scale: float = 1, digits: int = 2) -> str:
    return f"{scale * min(values):.{digits}f} to {scale * max(values):.{digits}f}"


if __name__ == "__main__":
    main()
