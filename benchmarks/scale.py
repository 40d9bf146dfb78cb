"""What a round costs on many ranks, on paper: constants that are measured here, in the formulas of docs/scale.md.

The network between machines cannot be measured on one, so it is given in bytes per second.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import mixfed as mf
from mixfed.backends.distributed.ranks import Ranks
from mixfed.backends.distributed.shares import longest_first
from mixfed.core.schedule import sample_cohort

CLIENTS, COHORT, RANKS = 10**7, 10**4, 64
STEPS, BATCH = 10, 10


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    work()
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return median(took)


def talk(rank: int, size: int, folder: str) -> None:
    """Two ranks on this machine: seconds of a short letter, and of a sum by its bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size)
    ranks, numbers = Ranks(), torch.zeros(10**7)
    letter = seconds(lambda: ranks.gather("short"), 200)
    total = seconds(lambda: ranks.sum(numbers))
    if rank == 0:
        torch.save((letter, total / numbers.nbytes), Path(folder) / "found.pt")
    dist.destroy_process_group()


def client(parameters: int) -> tuple[float, float]:
    """Seconds of one client's round on one core, and of the server's step, with an MLP of so many parameters."""
    width = int((parameters / 2) ** 0.5)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    x = np.random.default_rng(0).normal(size=(4 * BATCH * STEPS, width)).astype(np.float32)
    data = mf.FederatedData({"x": x, "y": np.zeros(len(x), np.int64)}, np.arange(5) * BATCH * STEPS)
    model = mf.Model(module, mf.cross_entropy)
    algorithm = mf.fedavg(mf.LocalTrainer(model, mf.sgd(0.01), mf.Batching(BATCH, steps=STEPS)))
    took: list[float] = [time.perf_counter()]
    callbacks = [lambda record: took.append(time.perf_counter())]
    mf.run(algorithm, data, rounds=4, cohort=4, backend=mf.Simulator("loop", threads=1), callbacks=callbacks)
    params = model.initial()
    step = seconds(lambda: mf.tree.add(params, params, 0.1), 3)
    return median(np.diff(took)[1:]) / 4, step


def constants() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(talk, (2, folder), 2)
        letter, per_byte = torch.load(Path(folder) / "found.pt")
        weights = {"w": torch.zeros(10**7)}
        write = seconds(lambda: save_file(weights, Path(folder) / "w.safetensors"), 3) / weights["w"].nbytes
    torch.set_num_threads(1)
    small, step_small = client(10**6)
    large, step_large = client(10**7)
    draw = seconds(lambda: sample_cohort(0, 1, "clients", CLIENTS, COHORT, set(), 0))
    deal = seconds(lambda: longest_first(np.random.default_rng(0).integers(1, 99, COHORT), RANKS))
    return {
        "letter": letter, "sum_byte": per_byte, "write_byte": write, "draw": draw, "deal": deal,
        "client_1e6": small, "client_1e8": 10 * large, "step_1e6": step_small, "step_1e8": 10 * step_large,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--network", type=float, default=1.25e9, help="bytes per second between machines (10 Gbit/s)")
    given = parser.parse_args()
    found = constants()
    console = Console(width=110)
    console.print({name: float(f"{value:.3g}") for name, value in found.items()})
    table = Table(title=f"{CLIENTS:,} clients, {COHORT:,} a round, {RANKS} ranks, {given.network:.3g} bytes/s")
    for heading in (
        "parameters",
        "MB sent a rank",
        "clients s",
        "sum s",
        "letters s",
        "draw and deal s",
        "step s",
        "round s",
    ):
        table.add_column(heading, justify="right")
    for name, parameters in (("1e6", 10**6), ("1e8", 10**8)):
        sent = 2 * (RANKS - 1) / RANKS * 4 * parameters
        parts = [
            COHORT / RANKS * found[f"client_{name}"],
            sent * max(1 / given.network, found["sum_byte"]),
            2 * found["letter"] * (RANKS - 1),
            found["draw"] + found["deal"],
            found[f"step_{name}"],
        ]
        table.add_row(name, f"{sent / 1e6:,.0f}", *(f"{x:.3g}" for x in parts), f"{sum(parts):.3g}")
    console.print(table)


if __name__ == "__main__":
    main()
