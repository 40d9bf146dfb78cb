"""What a round of a federation costs, part by part, on this machine: ``python benchmarks/federation.py``.

A SuperLink and four warm sites are started once. Measured are: until all sites have joined, an empty parcel there and
back, a synchronous round of FedAvg on all four sites, and a parcel of 100 MB there and back beside what the same bytes
take through plain sockets on loopback. With ``--cold`` sites are plain SuperNodes, which start a process a message.
With ``--bare`` the app is one of Flower's alone, which sends back what it was sent, on one site: what Flower takes for
the same bytes without mixfed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict

from mixfed.backends.federation import Federation
from mixfed.backends.flower.local import LocalFederation, free_port, script
from mixfed.backends.flower.post import GridPost
from mixfed.backends.parcels import Parcel, marks
from mixfed.experiments.app import write_app
from mixfed.experiments.build import build
from mixfed.experiments.federation import dealt, experiment_of, federated
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.request import Request
from mixfed.experiments.running import run_in_folder

SITES = 4
MB = 1_000_000
POLL = 0.05
"""Seconds after which an answer is looked for again; every look costs the SuperLink some milliseconds."""


class Cold(LocalFederation):
    """Sites as Flower starts them."""

    def start_site(self, number: int) -> None:
        options = ["--insecure", "--superlink", self.address, "--host", "127.0.0.1"]
        options += ["--port", str(free_port()), "--node-config", self.nodes[number]]
        self.start(f"site-{number}", [script("flower-supernode"), *options])


def answered(post: GridPost, name: str | None) -> float:
    """When the answer to a parcel is here."""
    while not post.receive([name or ""]):
        time.sleep(POLL)
    return time.monotonic()


def there_and_back(post: GridPost, site: int, parcel: Parcel, before: Parcel) -> float:
    """Seconds to send a parcel, and from the answer to the one ``before`` (so that the node is awake) to its own."""
    (first,) = post.send([(site, before)], 600.0)
    began = time.monotonic()
    (name,) = post.send([(site, parcel)], 600.0)
    sent = time.monotonic()
    awake = max(sent, answered(post, first))
    return sent - began + answered(post, name) - awake


def wire(size: int) -> float:
    """Seconds that so many bytes take there and back through a socket on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            connection, _ = server.accept()
            with connection:
                left, parts = size, []
                while left:
                    parts.append(connection.recv(min(left, 1 << 20)))
                    left -= len(parts[-1])
                connection.sendall(b"".join(parts))

        threading.Thread(target=echo, daemon=True).start()
        began = time.monotonic()
        with socket.create_connection(server.getsockname()) as connection:
            connection.sendall(bytes(size))
            left = size
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
    return time.monotonic() - began


BARE = """
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

app = ClientApp()
server = ServerApp()


@app.query()
def echo(message, context):
    return Message(message.content, reply_to=message)
"""
BARE_PROJECT = """
[project]
name = "bare"
version = "1.0.0"
[tool.flwr.app]
publisher = "benchmarks"
[tool.flwr.app.components]
serverapp = "bare:server"
clientapp = "bare:app"
"""


def bare(cold: bool, megabytes: int) -> dict[str, Any]:
    """What Flower alone takes for an echo: the median of three, after one that does not count."""
    with tempfile.TemporaryDirectory() as name:
        app = Path(name) / "app"
        app.mkdir()
        (app / "pyproject.toml").write_text(BARE_PROJECT)
        (app / "bare.py").write_text(BARE)
        federation = (Cold if cold else LocalFederation)(Path(name) / "federation", ["number=0"])
        with federation, federation.grid(app) as grid:
            while not (sites := list(grid.get_node_ids())):
                time.sleep(0.1)
            laps = []
            for _ in range(4):
                data = os.urandom(megabytes * MB)
                record = RecordDict({"x": ArrayRecord({"x": Array("uint8", (len(data),), "bytes", data)})})
                began = time.monotonic()
                names = list(grid.push_messages([Message(record, sites[0], "query", ttl=600.0)]))
                while not list(grid.pull_messages(names)):
                    time.sleep(POLL)
                laps.append(time.monotonic() - began)
    told = f"{megabytes} MB there and back, Flower alone"
    return {"sites": "cold" if cold else "warm", told: round(statistics.median(laps[1:]), 3)}


def measured(cold: bool, rounds: int, megabytes: int) -> dict[str, Any]:
    found: dict[str, Any] = {"sites": "cold" if cold else "warm"}
    recipe = Request("digits", ["cohort=8", "evaluate.every=1000"], rounds=rounds, backend="flower").on(
        Request("digits").base()
    )
    experiment = build(recipe)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_app(place / "app", recipe)
        nodes = [
            f'clients="{clients}" folder="{place / str(i)}"'
            for i, clients in enumerate(dealt(len(experiment.clients), SITES))
        ]
        began = time.monotonic()
        federation = (Cold if cold else LocalFederation)(place / "federation", nodes)
        with federation, federation.grid(place / "app") as grid:
            found["until the run has begun"] = time.monotonic() - began
            folder, times = RunFolder(place / "run"), [time.monotonic()]
            remote = federated(experiment, grid, folder, say=print)
            run_in_folder(remote, folder, callbacks=[lambda record: times.append(time.monotonic())], page=False)
            backend = remote.remote
            assert isinstance(backend, Federation)
            laps = [b - a for a, b in pairwise(times)]
            found["first round, sites joining"] = laps[0]
            found["a round"] = statistics.median(laps[1:])
            found["slowest round"] = max(laps[1:])
            found["of a job: at work"] = backend.traffic.at_work / backend.traffic.jobs
            found["of a job: all"] = backend.traffic.seconds / backend.traffic.jobs
            post, header = GridPost(grid), marks(experiment_of(recipe)) | {"kind": "echo"}
            site, empty = min(post.sites()), Parcel(header)
            found["an empty parcel"] = statistics.median(there_and_back(post, site, empty, empty) for _ in range(5))
            if megabytes:
                for turn in ("the first time", "the second time"):  # memory is got from the system only once
                    large = Parcel(header, os.urandom(megabytes * MB))
                    took = there_and_back(post, site, large, empty)
                    found[f"{megabytes} MB there and back, {turn}"] = took
                found["the same through a socket each way"] = wire(megabytes * MB)
                found["through two sockets each way"] = 2 * wire(megabytes * MB)
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--megabytes", type=int, default=100)
    given = parser.parse_args()
    found = bare(given.cold, given.megabytes) if given.bare else measured(given.cold, given.rounds, given.megabytes)
    print(json.dumps(found, indent=2))
    sys.exit(0)
