"""Flower's simulation on Ray: its FedAvg strategy and a ClientApp, one actor per core.

Kind to Flower: there are only as many virtual nodes as clients in a cohort (it looks at every node ten times a second)
and a message tells its node which client to be; nothing is evaluated; nothing is logged; an actor keeps the data.
"""

import logging
import os
import time
from functools import cache
from itertools import count
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from clock import Clock
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workloads import Workload, named

client_app = ClientApp()


@cache
def on_device(spec: str) -> tuple[Any, ...]:
    torch.set_num_threads(1)
    workload = named(spec)
    return workload, workload.model(), *workload.data()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    workload, model, x, y = on_device(config["workload"])
    client = config["client"]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.rate)
    for k in range(workload.steps):
        rows = slice(k * workload.batch, (k + 1) * workload.batch)
        optimizer.zero_grad()
        workload.loss(model, x[client, rows], y[client, rows]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": workload.examples})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


def run(workload: Workload, clock: Clock, cores: int) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(nodes := list(grid.get_node_ids())) < workload.clients:
            time.sleep(0.1)
        strategy = FedAvg()
        arrays = ArrayRecord(workload.model().state_dict())
        for round in count():
            messages = []
            for node, client in zip(nodes, workload.cohort(round), strict=True):
                config = ConfigRecord({"workload": workload.spec, "client": client})
                content = RecordDict({"arrays": arrays, "config": config})
                messages.append(Message(content, dst_node_id=node, message_type="train"))
            replies = list(grid.send_and_receive(messages))
            if failed := next((reply for reply in replies if reply.has_error()), None):
                raise RuntimeError(failed.error.reason)
            arrays = strategy.aggregate_train(round + 1, replies)[0]
            if not clock.lap(arrays.to_torch_state_dict):
                break

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.clients,
        backend_config={"init_args": {"num_cpus": cores}, "client_resources": resources},
    )
