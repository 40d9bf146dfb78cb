"""A real federation on loopback: a SuperLink and four sites, started once, which serve several algorithms in turn."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp import Grid

import mixfed as mf
from mixfed.backends.federation import Terms
from mixfed.backends.flower import FlowerBackend
from mixfed.backends.flower.local import LocalFederation
from mixfed.core.checkpoint import Checkpoints
from mixfed.evaluate.personal import local_test
from tests.algorithms.test_table import CENTRAL, FEDERATED, ROWS, TEST, assert_equal
from tests.flower.many import experiment_of, write_app
from tests.warm import ROOT, Process

pytestmark = pytest.mark.xdist_group("federation")

TERMS = Terms(deadline=20.0, assemble=60.0)
ROUNDS = 2


@dataclass
class Started:
    federation: LocalFederation
    app: Path
    grid: Grid

    def backend(self, row: str, terms: Terms = TERMS, **options: Any) -> FlowerBackend:
        return FlowerBackend(self.grid, experiment_of(row), terms, **options)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("federation")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("OMP_NUM_THREADS", "1")
        nodes = [f'first={i} folder="{folder / str(i)}"' for i in range(4)]
        federation = LocalFederation(folder / "federation", nodes)
        app = write_app(folder / "app")
        with federation, federation.grid(app) as grid:
            yield Started(federation, app, grid)
    assert not federation.processes


def trained(row: str, backend: Any, **options: Any) -> mf.Result:
    how: dict[str, Any] = {"rounds": ROUNDS, "seed": 3, "schedule": mf.Schedule(7), "central": CENTRAL} | options
    return mf.run(ROWS[row].make(), FEDERATED, backend=backend, **how)


def simulated(row: str, **options: Any) -> mf.Result:
    return trained(row, mf.Simulator("loop", threads=1), **options)


SAME = [
    *("fedavg", "parallel", "example_transfer", "gradient_2way", "gradient_2way, rows"),
    "fedavg, head global, 8-bit uploads",
]


@pytest.mark.parametrize("row", SAME)
def test_a_synchronous_federation_gives_the_simulators_bits(row: str, started: Started) -> None:
    backend = started.backend(row)
    there, here = trained(row, backend), simulated(row)
    assert_equal(here.params, there.params)
    assert here.ledger == there.ledger
    assert backend.traffic.bytes_up >= there.ledger["bytes_up"]


def test_private_parts_outlive_a_site_and_devices_evaluate(started: Started, tmp_path: Path) -> None:
    """The site is killed between two parts of a run. It comes back under another number, with its files."""
    row, told = "fedadam, head global", list[str]()
    evaluate = local_test(ROWS[row].make(), FEDERATED, ("loss",))
    how: dict[str, Any] = {"schedule": mf.Schedule(12), "rounds": 3, "evaluate": evaluate}

    def restart(record: mf.Record) -> None:
        if record.round == 1:
            started.federation.kill("site-3")
            started.federation.start_site(3)
            until = time.monotonic() + 60
            while not any("has come back" in sentence for sentence in told):
                assert time.monotonic() < until
                backend.wait(backend.clock.read(), 0)
                time.sleep(0.1)

    backend = started.backend(row, say=told.append)
    there, here = trained(row, backend, callbacks=[restart], **how), simulated(row, **how)
    assert_equal(here.params, there.params)
    assert there.metrics == pytest.approx(here.metrics, rel=1e-6)


@pytest.mark.parametrize("row", ["fedbuff", "feddle"])
def test_asynchronous_in_real_time(row: str, started: Started, tmp_path: Path) -> None:
    """The delays that were seen are a trace, and the simulator with that trace learns as much."""
    lines = ["source,client,round,delay"]
    backend = started.backend(row, observe=lambda *seen: lines.append(",".join(map(str, seen))))
    how: dict[str, Any] = {"rounds": 5, "evaluate": mf.evaluator(ROWS[row].make().model, TEST), "every": 5}
    there = trained(row, backend, schedule=mf.Schedule(3, concurrency=6, buffer=3, late="use"), **how)
    trace = tmp_path / "delays.csv"
    trace.write_text("\n".join(lines) + "\n")
    delays = mf.Trace(str(trace))
    here = simulated(row, schedule=mf.Schedule(3, delays, concurrency=6, buffer=3, late="use"), **how)
    assert there.rounds == 5
    assert there.metrics["loss"] == pytest.approx(here.metrics["loss"], abs=0.3)


@dataclass(frozen=True)
class Plan:
    """A run whose server is killed: it pauses before it sends the messages of round ``pause``, and has sent those of
    round ``sent`` when it dies. With ``wanted`` jobs (client, round) the next server stops when all have reported."""

    row: str
    schedule: mf.Schedule
    rounds: int
    pause: int
    sent: int
    wanted: frozenset[tuple[int, int]] = frozenset()


class Pausing(FlowerBackend):
    """Waits before it sends the messages of one round until it is told to go on."""

    def pause(self, round: int, home: Path) -> None:
        self.round, self.home = round, home

    def submit(self, jobs: Any, message: Any) -> None:
        if message.round == self.round:
            (self.home / "paused").touch()
            until((self.home / "go").exists)
        super().submit(jobs, message)
        (self.home / f"sent-{message.round}").touch()


def serve(folder: Path, address: str, app: Path, plan: Plan, home: Path) -> None:
    """A server in a process of its own: ``flwr run``, and the loop. It goes on from a checkpoint that is there."""
    federation, seen = LocalFederation(folder, []), list[tuple[int, int]]()
    federation.address = address

    def observe(source: str, client: int, round: int, delay: float) -> None:
        seen.append((client, round))

    with federation.grid(app) as grid:
        backend = Pausing(grid, experiment_of(plan.row), TERMS, observe=observe)
        backend.pause(plan.pause if not (home / "go").exists() else -1, home)
        how: dict[str, Any] = {"checkpoints": Checkpoints(home / "checkpoints", every=1), "resume": True}
        how["should_stop"] = lambda: bool(plan.wanted) and plan.wanted <= set(seen)
        result = trained(plan.row, backend, schedule=plan.schedule, rounds=plan.rounds, **how)
    (home / "result").write_bytes(pickle.dumps((result.params, result.ledger, result.rounds, seen)))


def until(condition: Callable[[], bool], process: Process | None = None, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.told()
        assert time.monotonic() < end, "nothing happened for too long"
        time.sleep(0.02)


def killed_and_resumed(started: Started, plan: Plan, home: Path) -> Any:
    """Site 2 stands still while messages are sent, so that its own are in flight when the server is killed. Then it
    does that work, for nobody; and another server goes on from the checkpoint."""
    federation = started.federation
    server = federation.folder, federation.address, started.app, plan, home
    first = Process(serve, *server)
    until((home / "paused").exists, first)
    site = federation.processes["site-2"].pid
    os.killpg(site, signal.SIGSTOP)
    try:
        (home / "go").touch()
        until((home / f"sent-{plan.sent}").exists, first)
        first.send_signal(signal.SIGKILL)
        assert first.wait(10.0) == -signal.SIGKILL
    finally:
        os.killpg(site, signal.SIGCONT)
    second = Process(serve, *server)
    told = second.communicate()
    assert second.returncode == 0, told
    return pickle.loads((home / "result").read_bytes())


def test_a_killed_server_goes_on_and_devices_that_were_ahead_go_back(started: Started, tmp_path: Path) -> None:
    """Killed in round 1 of a synchronous run whose devices keep something: the end is that of a run without a fault."""
    plan = Plan("fedavg, head global", mf.Schedule(12), rounds=3, pause=1, sent=1)
    params, ledger, rounds, seen = killed_and_resumed(started, plan, tmp_path)
    here = simulated(plan.row, schedule=plan.schedule, rounds=plan.rounds)
    assert rounds == plan.rounds
    assert {round for _, round in seen} == {1, 2}  # the second server has round 0 from the checkpoint
    assert_equal(here.params, params)
    assert here.ledger == ledger


def test_messages_in_flight_at_a_checkpoint_are_sent_again_by_the_next_server(started: Started, tmp_path: Path) -> None:
    """Asynchronous: others go on while site 2 has not answered, and checkpoints know of its jobs."""
    schedule = mf.Schedule(3, concurrency=12, buffer=3, late="use")
    wanted = frozenset({(2, 0), (6, 0), (10, 0)})
    plan = Plan("fedbuff, head global, warm start", schedule, rounds=60, pause=0, sent=2, wanted=wanted)
    *_, rounds, seen = killed_and_resumed(started, plan, tmp_path)
    assert wanted <= set(seen)
    assert rounds > 2


def test_a_site_that_is_killed_in_mid_round_is_not_waited_for(started: Started) -> None:
    """Last, for the site does not come back. Synchronous: the rest goes on after the deadline; then asynchronous:
    nobody waits at all."""
    killed: list[float] = []

    class Kills(FlowerBackend):
        def submit(self, jobs: Any, message: Any) -> None:
            super().submit(jobs, message)
            if message.round >= 1 and not killed:
                started.federation.kill("site-2")
                killed.append(time.monotonic())

    terms = Terms(deadline=8.0, assemble=60.0)
    backend = Kills(started.grid, experiment_of("fedprox"), terms)
    result = trained("fedprox", backend, schedule=mf.Schedule(12, patience=2), rounds=3)
    assert result.rounds == 3
    assert time.monotonic() - killed[0] < 90
    assert backend.traffic.jobs >= 12
    late = started.backend("fedbuff", Terms(deadline=150.0, assemble=2.0))
    began = time.monotonic()
    schedule = mf.Schedule(3, concurrency=8, buffer=3, late="use")
    assert trained("fedbuff", late, schedule=schedule, rounds=3).rounds == 3
    assert time.monotonic() - began < 120  # below the deadline
