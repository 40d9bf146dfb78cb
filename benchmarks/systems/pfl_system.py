"""pfl (pfl-research): FederatedAveraging on its SimulatedBackend, in one process or in one per core.

With several processes pfl splits the cohort by itself and all-reduces over torch.distributed; it is told so by two
environment variables that must be set before it is imported, so every process starts this file with its own rank.
"""

import os
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path

import torch
from clock import Clock
from workloads import Workload, named


def simulate(workload: Workload, clock: Clock | None, threads: int) -> None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.internal.ops.pytorch_ops import distributed
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Lap(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            going = clock.lap(lambda: model.variable_map) if clock else True
            if distributed.world_size > 1:  # rank 0 holds the clock; all ranks stop together
                going = distributed.all_reduce([torch.tensor([float(not going)])])[0].item() == 0
            return not going, Metrics()

    torch.set_num_threads(threads)
    x, y = workload.data()
    module = workload.model()
    module.loss = lambda inputs, wanted: workload.loss(module, inputs, wanted)
    module.metrics = lambda inputs, wanted: {"examples": Weighted(len(inputs), len(inputs))}
    clients = (client for round in count() for client in workload.cohort(round))
    data = FederatedDataset(
        lambda client: PyTorchTensorDataset((x[client], y[client]), user_id=str(client)),
        lambda: next(clients),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            train_cohort_size=workload.clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=workload.rate, local_batch_size=workload.batch),
        callbacks=[Lap()],
        send_metrics_to_platform=False,
    )


def run(workload: Workload, clock: Clock, cores: int, processes: int) -> None:
    if processes == 1:
        return simulate(workload, clock, threads=cores)
    addresses = []
    for _ in range(processes):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            addresses.append(f"localhost:{free.getsockname()[1]}")
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(addresses)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "systems.pfl_system", workload.spec],
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "PFL_WORKER_RANK": str(rank)},
        )
        for rank in range(1, processes)
    ]
    os.environ["PFL_WORKER_RANK"] = "0"
    try:
        simulate(workload, clock, threads=cores // processes or 1)
        for process in ranks:
            process.wait(timeout=30)
    finally:
        for process in ranks:
            process.kill()
    return None


if __name__ == "__main__":
    simulate(named(sys.argv[1]), None, threads=1)
