"""Plain PyTorch as well as we can write it: one client after another, all cores inside each operator."""

from itertools import count

import torch
from clock import Clock
from workloads import Workload

from systems.worker import Worker


def run(workload: Workload, clock: Clock, cores: int) -> None:
    torch.set_num_threads(cores)
    x, y = workload.data()
    worker = Worker(workload)
    for round in count():
        worker.train(x, y, workload.cohort(round))
        torch._foreach_copy_(worker.start, worker.total)
        if not clock.lap(worker.named):
            break
