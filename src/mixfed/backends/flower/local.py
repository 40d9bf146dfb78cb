"""A whole federation on this machine: a SuperLink and sites as processes of their own, on loopback ports.

The server's part runs in the process that starts it, so that a user sees its progress and can interrupt it. Whatever
was started is stopped again, also after an error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from mixfed.backends.flower.tasks import connect, finish, heartbeat, pull_input, tokens
from mixfed.errors import RunStopped

_C = ctypes.CDLL(None)  # before there is a fork, after which little is safe to do
_PR_SET_PDEATHSIG = 1
_SITE = "site-"
PATIENCE = 60.0
"""Seconds within which a SuperLink must be up."""


@dataclass(frozen=True)
class Keys:
    """Files for TLS and authentication: the authority's certificate, the SuperLink's with its key, and a private key
    for each site (whose public half is beside it, ``.pub``)."""

    authority: Path
    certificate: Path
    key: Path
    sites: Sequence[Path]

    def of_link(self) -> list[str]:
        """Options of the SuperLink."""
        files = {"--ssl-ca-certfile": self.authority, "--ssl-certfile": self.certificate, "--ssl-keyfile": self.key}
        return ["--enable-supernode-auth", *(str(word) for pair in files.items() for word in pair)]

    def of_site(self, number: int) -> list[str]:
        """Options of a site."""
        return ["--root-certificates", str(self.authority), "--auth-supernode-private-key", str(self.sites[number])]


class LocalFederation:
    """A SuperLink, and a site for each of ``nodes`` (what ``--node-config`` says to it). Logs go to ``folder``.

    With ``keys`` what they say is encrypted, and only sites that were registered are let in; so each is to be started
    once it is (:meth:`register`, :meth:`start_site`).
    """

    def __init__(self, folder: Path, nodes: Sequence[str], keys: Keys | None = None) -> None:
        self.folder, self.nodes, self.keys = folder.resolve(), nodes, keys
        self._authority = keys.authority.read_bytes() if keys else None
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []

    def __enter__(self) -> LocalFederation:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        trust = f'root-certificates = "{self.keys.authority}"' if self.keys else "insecure = true"
        connection = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{self.address}"\n{trust}\n'
        (self.folder / "config.toml").write_text(connection)
        try:
            link = ["--isolation", "process", "--host", "127.0.0.1", "--port", str(self.port)]
            link += self.keys.of_link() if self.keys else ["--insecure"]
            self.start("superlink", [script("flower-superlink"), *link, "--disable-runtime-dependency-installation"])
            for i in range(0 if self.keys else len(self.nodes)):
                self.start_site(i)
            self._wait_for_link()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start_site(self, number: int) -> None:
        """Starts the site of this number, also once more after it was killed."""
        options = self.keys.of_site(number) if self.keys else ["--insecure"]
        options += ["--superlink", self.address, "--node-config", self.nodes[number]]
        self.start(f"{_SITE}{number}", [sys.executable, "-m", "mixfed.backends.flower.worker", *options])

    def start(self, name: str, command: Sequence[str]) -> None:
        """Starts a process in a session of its own, which a Ctrl-C of the user's does not reach."""
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115 (closed when everything is stopped)
        self._logs.append(log)
        self.processes[name] = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self.environment(),
            start_new_session=True,
            preexec_fn=_ends_with_its_parent if sys.platform == "linux" else None,
        )

    def environment(self) -> Mapping[str, str]:
        """That of this process, with a home for Flower in the folder; sites share this machine's cores.

        Flower finds its own commands by name, so that they are looked for beside this Python first.
        """
        own = {"FLWR_HOME": str(self.folder), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        own["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {"OMP_NUM_THREADS": "1"} | os.environ | own

    def sites_alive(self) -> int:
        """How many sites have not ended, so that they are there or may still come."""
        return sum(name.startswith(_SITE) and process.poll() is None for name, process in self.processes.items())

    def kill(self, name: str) -> None:
        """Kills a process and what it started, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes.pop(name).wait()

    def stop(self) -> None:
        """Stops everything: sites first, and whoever does not stop within seconds is killed."""
        running = list(reversed(self.processes))
        for name in running:
            with suppress(ProcessLookupError):
                os.killpg(self.processes[name].pid, signal.SIGTERM)
        until = time.monotonic() + 3.0
        for name in running:
            with suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(max(0.0, until - time.monotonic()))
            self.kill(name)
        for log in self._logs:
            log.close()

    @contextmanager
    def grid(self, app: Path) -> Iterator[Grid]:
        """Submits an app and takes over its server's part: the grid is the run's for as long as this is active."""
        self.submit(app)
        until = time.monotonic() + PATIENCE
        waiting = tokens(
            self.address, TaskType.SERVER_APP, stopped=lambda: time.monotonic() > until, authority=self._authority
        )
        for token in waiting:
            with server_task(self.address, token, self._authority) as grid:
                yield grid
            return
        raise RunStopped(f"Flower did not start the run; see the logs in {self.folder}.")

    def submit(self, app: Path) -> None:
        """``flwr run``."""
        self._flwr("run", str(app), "here")

    def register(self, number: int) -> None:
        """``flwr supernode register``: the site of this number is let in."""
        assert self.keys is not None
        self._flwr("supernode", "register", f"{self.keys.sites[number]}.pub", "here")

    def _flwr(self, *words: str) -> None:
        command = [script("flwr"), *words, "--format", "json"]
        done = subprocess.run(command, env=dict(self.environment()), capture_output=True, text=True)
        with suppress(ValueError):
            if done.returncode == 0 and json.loads(done.stdout[done.stdout.index("{") :]).get("success"):
                return
        told = " ".join((done.stdout + done.stderr).split())[-300:]
        raise RunStopped(f"'flwr {' '.join(words)}' failed: {told}")

    def _wait_for_link(self) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.processes["superlink"].poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.1)
        raise RunStopped(f"The SuperLink did not start; see {self.folder / 'superlink.log'}.")


@contextmanager
def server_task(address: str, token: str, authority: bytes | None = None) -> Iterator[Grid]:
    """The grid of a server's task; Flower is told how the task ends."""
    client = connect(address, token, "flwr-serverapp", authority)
    grid = HttpGrid(address, insecure=authority is None, root_certificates=authority, token=token)
    status, details = SubStatus.FAILED, "The server's part ended early."
    try:
        with heartbeat(client, stops=True):
            given = pull_input(client)
            TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
            TaskIdentity.node_id = given.context.node_id
            grid.set_run(run_from_proto(given.run))
            yield grid
            status, details = SubStatus.COMPLETED, ""
    finally:
        with suppress(Exception):  # the SuperLink may be gone by now
            finish(client, status, details)
        grid.close()
        client.close()


def _ends_with_its_parent() -> None:
    """Asks Linux to stop this process when the one that started it is killed and can stop nothing itself."""
    _C.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def script(name: str) -> str:
    """A command that was installed beside this Python."""
    return str(Path(sys.executable).with_name(name))


def free_port() -> int:
    """A port on loopback that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
