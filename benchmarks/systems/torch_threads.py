"""A pool of Python threads, one core each, that share the cohort: PyTorch releases the interpreter in its kernels."""

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import torch
from clock import Clock
from workloads import Workload

from systems.worker import Worker


def run(workload: Workload, clock: Clock, cores: int) -> None:
    torch.set_num_threads(1)
    x, y = workload.data()
    workers = [Worker(workload) for _ in range(cores)]
    server = workers[0]
    for worker in workers[1:]:
        worker.start = server.start
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for round in count():
            cohort = workload.cohort(round)
            list(pool.map(lambda i, c=cohort: workers[i].train(x, y, c[i::cores]), range(cores)))
            torch._foreach_copy_(server.start, server.total)
            for worker in workers[1:]:
                torch._foreach_add_(server.start, worker.total)
            if not clock.lap(server.named):
                break
