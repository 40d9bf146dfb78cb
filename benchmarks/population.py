"""A round's cost follows the cohort, not the population: the same work on 10³ to 10⁶ clients.

Every population is opened from disk, memory-mapped, in a process of its own, which prints the seconds to open it, the
seconds per round and its peak memory beside the size of the data.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from clock import peak_memory
from rich.console import Console
from rich.table import Table

EXAMPLES, FEATURES, COHORT = 10, 64, 100


def write(clients: int, folder: Path) -> None:
    import mixfed as mf

    draw = np.random.default_rng(0)
    rows = clients * EXAMPLES
    x = draw.integers(0, 256, (rows, FEATURES), dtype=np.uint8)
    data = mf.FederatedData({"x": x, "y": (x[:, 0] > 127).astype(np.int64)}, np.arange(clients + 1) * EXAMPLES)
    data.save(folder)


def one(folder: Path, rounds: int) -> None:
    """Opens a population and trains on it: what the child process does."""
    import torch

    import mixfed as mf
    from mixfed.data import Pixels

    start = time.perf_counter()
    data = mf.FederatedData.open(folder, prepare=Pixels())
    opened = time.perf_counter() - start
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    model = mf.Model(module, mf.cross_entropy)
    algorithm = mf.fedavg(mf.LocalTrainer(model, mf.sgd(0.1), mf.Batching(5, steps=4)))
    laps = [time.perf_counter()]
    mf.run(
        algorithm,
        data,
        rounds=rounds,
        cohort=COHORT,
        backend=mf.Simulator("vmap"),
        callbacks=[lambda record: laps.append(time.perf_counter())],
    )
    times = np.diff(laps)[rounds // 4 :]
    print(json.dumps({"open": opened, "round": median(times), "memory": peak_memory()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="1000,10000,100000,1000000")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one, given.rounds)
        return
    table = Table(title=f"FedAvg, {COHORT} clients a round, by population")
    for heading in ("clients", "data MB", "open s", "ms per round", "ratio", "peak MB"):
        table.add_column(heading, justify="right")
    found = {}
    with tempfile.TemporaryDirectory() as parent:
        for clients in map(int, given.sizes.split(",")):
            folder = Path(parent) / str(clients)
            write(clients, folder)
            size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6
            child = [sys.executable, __file__, "--one", str(folder), "--rounds", str(given.rounds)]
            row = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            found[clients] = row | {"data": size}
            ratio = row["round"] / next(iter(found.values()))["round"]
            table.add_row(
                f"{clients:,}", f"{size:,.0f}", f"{row['open']:.3f}", f"{1000 * row['round']:.1f}", f"{ratio:.2f}",
                f"{row['memory']:,.0f}",
            )  # fmt: skip
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
