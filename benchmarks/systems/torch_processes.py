"""One process per core, each with a share of the cohort; the sums meet in shared memory."""

from itertools import count

import torch
import torch.multiprocessing as mp
from clock import Clock
from torch import Tensor
from workloads import Workload, named

from systems.worker import Worker


def play(spec: str, rank: int, totals: list[list[Tensor]], going, barrier, clock: Clock | None = None) -> None:
    """Rank's share of every round; rank 0 holds the clock. ``totals`` has the sums of every rank."""
    torch.set_num_threads(1)
    workload = named(spec)
    x, y = workload.data()
    worker = Worker(workload)
    worker.total = totals[rank]
    for round in count():
        worker.train(x, y, workload.cohort(round)[rank :: len(totals)])
        barrier.wait()
        torch._foreach_copy_(worker.start, totals[0])
        for total in totals[1:]:
            torch._foreach_add_(worker.start, total)
        if clock:
            going.value = clock.lap(worker.named)
        barrier.wait()
        if not going.value:
            break


def run(workload: Workload, clock: Clock, cores: int) -> None:
    context = mp.get_context("spawn")
    totals = [[t.share_memory_() for t in Worker(workload).total] for _ in range(cores)]
    going, barrier = context.Value("b", True), context.Barrier(cores)
    ranks = [
        context.Process(target=play, args=(workload.spec, rank, totals, going, barrier), daemon=True)
        for rank in range(1, cores)
    ]
    for process in ranks:
        process.start()
    play(workload.spec, 0, totals, going, barrier, clock)
    for process in ranks:
        process.join()
