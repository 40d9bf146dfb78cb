"""How long ranks wait for each other where clients differ in size: clients dealt in turn, or the longest first.

Client sizes are log-normal, so that a few clients have most of the examples. Two ranks really run; the share for more
ranks is computed from the steps alone, as 1 − mean load / largest load.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import mixfed as mf
from mixfed.backends.distributed.ranks import Ranks
from mixfed.backends.distributed.shares import Deal, in_stretches, in_turn, longest_first, steps_of
from mixfed.core.schedule import sample_cohort

CLIENTS, COHORT, BATCH, WIDTH = 2000, 50, 10, 256
RULES: dict[str, Deal] = {"in turn": in_turn, "in stretches": in_stretches, "longest first": longest_first}


def sizes() -> np.ndarray:
    return np.ceil(np.random.default_rng(0).lognormal(3.0, 1.5, CLIENTS)).clip(max=3000).astype(np.int64)


def expected(deal: Deal, ranks: int, rounds: int) -> float:
    """The idle share over some rounds, if time follows steps."""
    steps = steps_of(sizes(), mf.Batching(BATCH, epochs=1))
    worked = longest = 0.0
    for number in range(rounds):
        cohort = sample_cohort(0, number, "clients", CLIENTS, COHORT, set(), 0)
        loads = np.bincount(deal(steps[cohort], ranks), steps[cohort], ranks)
        worked, longest = worked + loads.mean(), longest + loads.max()
    return 1 - worked / longest


def play(rank: int, size: int, rounds: int, folder: str) -> None:
    """One rank: the seconds that it waited and took, by rule."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size)
    ranks, draw = Ranks(), np.random.default_rng(1)
    examples = int(sizes().sum())
    x = draw.normal(size=(examples, WIDTH)).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(sizes())])
    data = mf.FederatedData({"x": x, "y": (x[:, 0] > 0).astype(np.int64)}, offsets)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
    model = mf.Model(module, mf.cross_entropy)
    algorithm = mf.fedavg(mf.LocalTrainer(model, mf.sgd(0.05), mf.Batching(BATCH, epochs=1)))
    found = {}
    for _ in range(2):  # the first time warms up
        for rule, deal in RULES.items():
            ranks.any(False)
            ranks.waited, began = 0.0, time.perf_counter()
            mf.run(algorithm, data, rounds=rounds, cohort=COHORT, backend=mf.Distributed(ranks, "loop", deal=deal))
            found[rule] = (ranks.waited, time.perf_counter() - began)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="how many really run")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(play, (given.ranks, given.rounds, folder), given.ranks)
        measured = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(given.ranks)]
    table = Table(
        title=f"Idle share of ranks; {COHORT} of {CLIENTS} clients, sizes {np.percentile(sizes(), [10, 50, 90, 99])}"
    )
    for heading in ("rule", f"measured, {given.ranks} ranks", "seconds", "by steps: 2", "8", "16"):
        table.add_column(heading, justify="right" if heading != "rule" else "left")
    for rule, deal in RULES.items():
        waited, took = (sum(one[rule][i] for one in measured) for i in (0, 1))
        shares = [f"{expected(deal, ranks, given.rounds):.1%}" for ranks in (2, 8, 16)]
        table.add_row(rule, f"{waited / took:.1%}", f"{took / given.ranks:.2f}", *shares)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
