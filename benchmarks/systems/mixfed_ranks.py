"""mixfed on ranks: one process per core, each with one core, as ``torchrun`` starts them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from clock import Clock
from rounds import Rounds
from workloads import Workload, named

import mixfed as mf
from mixfed.backends.distributed.ranks import Ranks
from systems.mixfed_system import work


def play(rank: int, size: int, spec: str, meeting: str, clock: Clock | None = None) -> None:
    """One rank; rank 0 holds the clock, and all stop together."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=size)
    ranks, workload = Ranks(), named(spec)
    rounds = Rounds(*work(workload), mf.Distributed(ranks, say=print if ranks.leads else lambda sentence: None))
    going = True
    while going:
        rounds.next(np.array(workload.cohort(rounds.number)))
        is_over = clock is not None and not clock.lap(lambda: rounds.state["params"])
        going = not ranks.any(is_over)
    dist.destroy_process_group()


def run(workload: Workload, clock: Clock, cores: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        context = mp.get_context("spawn")
        others = [
            context.Process(target=play, args=(rank, cores, workload.spec, meeting), daemon=True)
            for rank in range(1, cores)
        ]
        for process in others:
            process.start()
        play(0, cores, workload.spec, meeting, clock)
        for process in others:
            process.join()
