"""The loop: one round after another, the same for every algorithm and every backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mixfed.core import tree
from mixfed.core.algorithm import CENTRE, CLIENTS, Algorithm, Server, State
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.fit import check_fit
from mixfed.core.ledger import Ledger
from mixfed.core.policy import Backend, Exchange
from mixfed.core.private import PrivateStore
from mixfed.core.schedule import Joining, Schedule
from mixfed.core.tree import Params
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.evaluate.personal import bytes_once


@dataclass(frozen=True)
class Record:
    """What callbacks see after every round; ``metrics`` is empty where the round was not evaluated, ``diagnostics``
    where the algorithm has none or took no step."""

    round: int
    rounds: int
    metrics: Mapping[str, float]
    ledger: Mapping[str, int]
    dropped: int
    params: Params
    diagnostics: Mapping[str, float] = field(default_factory=dict)


Callback = Callable[[Record], None]
Evaluate = Callable[[Params, PrivateStore], Mapping[str, float]]


@dataclass
class Result:
    """A finished (or interrupted) run: ``history`` has the evaluated rounds, ``diagnostics`` those with a step."""

    params: Params
    history: list[dict[str, Any]]
    ledger: dict[str, int]
    rounds: int
    seconds: float
    seed: int
    dropped: int = 0
    finished: bool = True
    diagnostics: list[dict[str, Any]] = field(default_factory=list)
    state: State = field(default_factory=dict)
    privates: PrivateStore | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation."""
        last = self.history[-1] if self.history else {}
        return {name: value for name, value in last.items() if name != "round"}


def run(
    algorithm: Algorithm,
    data: FederatedData | Mapping[str, FederatedData] | None,
    *,
    rounds: int,
    cohort: int | Mapping[str, int] = 10,
    schedule: Schedule | None = None,
    central: CentralData | Mapping[str, CentralData] | None = None,
    seed: int = 0,
    evaluate: Evaluate | None = None,
    every: int = 1,
    backend: Backend | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    joining: Joining | None = None,
    private_folder: str | Path | None = None,
) -> Result:
    """Trains for a number of rounds and returns the model, its metrics and what it cost.

    ``data`` are the clients (several populations by name), ``central`` is what the server holds. Every round asks a
    ``cohort`` and waits for it, unless a ``schedule`` says otherwise (delays, buffer, concurrency). With
    ``checkpoints`` the run can be resumed at any round and ends bit for bit as if it had never stopped.
    ``should_stop`` is asked after every round; a run that stops early has ``finished = False``. With ``joining`` the
    last client joins later. What clients keep to themselves is simulated in memory, or on disk in ``private_folder``.
    """
    if rounds < 1 or every < 1:
        raise InputError("The number of rounds and the evaluation interval must be at least 1.")
    populations = _by_name(data, CLIENTS)
    sources = _by_name(central, CENTRE)
    schedule = schedule or Schedule(cohort)
    if joining:
        schedule = replace(schedule, joining=joining)
    if joining and joining.round >= rounds:
        raise InputError(f"A device that joins after {joining.round} rounds never joins a run of {rounds}.")
    _check(algorithm, populations, schedule)
    ledger = Ledger()
    untouched = algorithm.private(algorithm.model.initial())
    privates = PrivateStore(lambda: untouched, private_folder)
    state = algorithm.init(algorithm.model.initial())
    history: list[dict[str, Any]] = []
    diagnosed: list[dict[str, Any]] = []
    first, version, dropped, seconds = 0, 0, 0, 0.0
    saved = checkpoints.resume(seed=seed, rounds=rounds, every=every) if checkpoints and resume else None
    if saved:
        device = algorithm.model.device
        state, history, first = algorithm.restored(saved["state"], device), saved["history"], saved["round"]
        diagnosed = saved["diagnostics"]
        version, dropped, seconds = saved["version"], saved["dropped"], saved["seconds"]
        privates.restore(tree.to_device(saved.get("private", {}), device))
        ledger.restore(saved["ledger"])
    backend = backend or _simulator()
    backend.start(algorithm, populations, sources, privates, seed, ledger)
    sizes = {name: len(population) for name, population in populations.items()}
    exchange = Exchange(algorithm, backend, schedule, sizes, seed)
    if saved:
        backend.restore(saved["backend"])
        exchange.restore(saved["exchange"])

    began = time.monotonic() - seconds
    finished = True
    for number in range(first, rounds):
        server = Server(number, seed, algorithm.model, sources, ledger, sizes)
        messages = algorithm.broadcast(state, server)
        steps = exchange.round(messages, number, version)
        if joining and algorithm.settles and joining.settling(number):
            steps = []
        elif not steps and (not messages or algorithm.steps_alone):
            steps = [[]]
        for replies in steps:
            state, version = algorithm.step(state, replies, server), version + 1
            server.step += 1
        ledger.bytes_kept = max(ledger.bytes_kept, tree.nbytes(state))
        ledger.bytes_once = bytes_once(algorithm.personal, algorithm.params(state), privates)
        dropped += len(backend.dropped)
        backend.dropped.clear()

        done = number + 1
        params = algorithm.params(state)
        diagnostics = dict(algorithm.diagnostics(state)) if steps else {}
        if diagnostics:
            diagnosed.append({"round": done, **diagnostics})
        metrics: Mapping[str, float] = {}
        if evaluate and (done % every == 0 or done == rounds):
            metrics = {name: float(value) for name, value in evaluate(params, privates).items()}
            history.append({"round": done, **metrics})
        stop = should_stop()
        if checkpoints and (stop or checkpoints.due(done) or done == rounds):
            checkpoints.save(
                {
                    "state": state,
                    "history": history,
                    "diagnostics": diagnosed,
                    "seed": seed,
                    "round": done,
                    "version": version,
                    "dropped": dropped,
                    "seconds": time.monotonic() - began,
                    "private": privates.tree(),
                    "ledger": ledger.totals(),
                    "backend": backend.state(),
                    "exchange": exchange.tree(),
                }
            )
        for callback in callbacks:
            callback(Record(done, rounds, metrics, ledger.totals(), dropped, params, diagnostics))
        if stop and done < rounds:
            finished = False
            rounds = done
            break
    return Result(
        algorithm.params(state),
        history,
        ledger.totals(),
        rounds,
        time.monotonic() - began,
        seed,
        dropped,
        finished,
        diagnosed,
        state,
        privates,
    )


def _by_name(given: Any, name: str) -> dict[str, Any]:
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {name: given}


def _check(algorithm: Algorithm, populations: Mapping[str, FederatedData], schedule: Schedule) -> None:
    for source in algorithm.batching:
        if source not in populations:
            raise InputError(f"The algorithm {algorithm.name} trains on clients '{source}', and the run has none.")
        populations[source].require_no_empty_clients()
        schedule.check(source, populations[source], algorithm.buffer)
        check_fit(algorithm.model, populations[source], f"the examples of '{source}'")


def _simulator() -> Backend:
    from mixfed.backends.simulator.engine import Simulator

    return Simulator()
