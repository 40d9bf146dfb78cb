"""The loop: one round after another, the same for every algorithm and every backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mixfed.core import tree
from mixfed.core.alarms import Alarms, require_finite
from mixfed.core.algorithm import CENTRE, CLIENTS, Algorithm, Server, State
from mixfed.core.backend import Backend, Run
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.checks import Tests, by_name, check_data, check_settings
from mixfed.core.faults import Fault, worst
from mixfed.core.ledger import Ledger
from mixfed.core.model import Model
from mixfed.core.policy import Policy
from mixfed.core.predict import predict
from mixfed.core.schedule import Schedule
from mixfed.core.tree import Params
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError, RunStopped, from_extra


@dataclass(frozen=True)
class Record:
    """What callbacks see after every round.

    ``metrics`` is empty where the round was not evaluated, and ``diagnostics`` where the algorithm has none or took no
    step. ``history`` has all evaluated rounds, and ``seconds`` is how long the run has taken.
    """

    round: int
    rounds: int
    metrics: Mapping[str, float]
    ledger: Mapping[str, int]
    dropped: int
    params: Params
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    history: Sequence[Mapping[str, Any]] = ()
    seconds: float = 0.0


Callback = Callable[[Record], str | None]
"""Is told of every round; a sentence that it returns ends the run (:mod:`mixfed.core.stopping`)."""
Evaluate = Callable[[Params, Any], Mapping[str, float]]
"""Metrics of the common model, and of clients' own ones as far as the backend lets see them."""


@dataclass(frozen=True)
class OnSets:
    """An evaluation and the examples that it is on, by name ("": all of them); a run looks at them before it begins."""

    evaluate: Evaluate
    sets: Tests

    def __call__(self, params: Params, clients: Any) -> Mapping[str, float]:
        """The metrics of the parameters, given what the backend shows of the clients."""
        return self.evaluate(params, clients)


@dataclass(repr=False)
class Result:
    """A finished (or interrupted) run: ``history`` has the evaluated rounds, ``diagnostics`` those with a step.

    ``faults`` are the clients whose updates were ``dropped`` or absurdly long, and how often. ``privates`` is what the
    backend shows of the clients' private parts. ``warnings`` are sentences about what is likely wrong, and ``broken``
    is the one that says why the model is of no use, if it is so. ``costs`` has what each evaluated round had cost until
    then: bytes sent (down and up together) and seconds. ``jobs`` has when the first clients were asked and reported,
    where they may be late.
    """

    params: Params
    history: list[dict[str, Any]]
    ledger: dict[str, int]
    rounds: int
    seconds: float
    seed: int
    dropped: int = 0
    faults: list[Fault] = field(default_factory=list)
    finished: bool = True
    diagnostics: list[dict[str, Any]] = field(default_factory=list)
    state: State = field(default_factory=dict)
    privates: Any = None
    warnings: list[str] = field(default_factory=list)
    broken: str = ""
    costs: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    model: Model | None = field(default=None, repr=False)
    ended: str = ""

    def predict(self, inputs: Any, *, raw: bool = False) -> Tensor | NDArray[np.str_]:
        """What the common model answers to inputs: names of classes, or measurements in the unit of the files.

        Inputs are as the network takes them. With ``raw`` the answers are the network's outputs.
        """
        if self.model is None:
            raise InputError("This result does not know its model, so it cannot answer.")
        return predict(self.model, self.params, inputs, raw=raw)

    def frame(self) -> Any:
        """The evaluated rounds as a pandas frame, with what each had cost until then."""
        pandas = from_extra("pandas", "pandas", "A frame")
        costs = {entry["round"]: entry for entry in self.costs}
        return pandas.DataFrame([{**costs.get(e["round"], {}), **e} for e in self.history]).set_index("round")

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        sent = self.ledger.get("bytes_down", 0) + self.ledger.get("bytes_up", 0)
        state = ", broken" if self.broken else "" if self.finished else ", not finished"
        return f"Result({self.rounds} rounds{state}; {told or 'not evaluated'}; {sent:,} bytes sent)"

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation."""
        last = self.history[-1] if self.history else {}
        return {name: value for name, value in last.items() if name != "round"}


@dataclass
class Progress:
    """How far a run has come: all that outlives a round, beside what the policy and the backend keep."""

    state: State
    ledger: Ledger
    round: int = 0
    version: int = 0
    dropped: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    diagnostics: list[dict[str, Any]] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""

    def tree(self, policy: Policy, backend: Backend) -> dict[str, Any]:
        """The whole run as a tree, for a checkpoint."""
        plain = ("state", "round", "version", "dropped", "seconds", "history", "diagnostics", "costs", "jobs", "ended")
        kept = {name: getattr(self, name) for name in plain}
        return kept | {"ledger": self.ledger.totals(), "policy": policy.tree(), "backend": backend.state()}

    def cost(self) -> dict[str, Any]:
        """What the run has cost so far."""
        sent = self.ledger.bytes_down + self.ledger.bytes_up
        return {"round": self.round, "bytes": sent, "seconds": round(self.seconds, 3)}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], algorithm: Algorithm) -> Progress:
        """The progress of a checkpoint."""
        ledger = Ledger()
        ledger.restore(saved["ledger"])
        state = algorithm.restore(saved["state"], algorithm.model.device)
        rest = ("round", "version", "dropped", "seconds", "history", "diagnostics", "costs", "jobs", "ended")
        return cls(state, ledger, **{name: saved[name] for name in rest})


@dataclass(frozen=True)
class Evaluation:
    """How and how often (every so many rounds, and after the last) a run is evaluated."""

    evaluate: Evaluate | None = None
    every: int = 1

    def tests(self) -> Tests:
        """The examples that the run is evaluated on, as far as the evaluation tells."""
        return self.evaluate.sets if isinstance(self.evaluate, OnSets) else {}

    def after(self, done: int, rounds: int, params: Params, backend: Backend) -> dict[str, float]:
        """The metrics, if this round is one to evaluate."""
        if self.evaluate is None or (done % self.every and done != rounds):
            return {}
        return {name: float(value) for name, value in self.evaluate(params, backend.clients()).items()}


def train(
    algorithm: Algorithm,
    data: FederatedData | Mapping[str, FederatedData] | None,
    backend: Backend,
    schedule: Schedule,
    *,
    rounds: int,
    central: CentralData | Mapping[str, CentralData] | None = None,
    seed: int = 0,
    evaluation: Evaluation | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Trains for a number of rounds on this backend. :func:`mixfed.run` says what the arguments mean."""
    evaluation = evaluation or Evaluation()
    check_settings(algorithm, schedule, rounds, evaluation.every)
    populations, sources = by_name(data, CLIENTS), by_name(central, CENTRE)
    sizes = {name: len(population) for name, population in populations.items()}
    found = check_data(algorithm, populations, sources, evaluation.tests(), schedule)
    alarms = Alarms(algorithm, evaluation.tests())
    policy = Policy(algorithm, schedule, sizes, seed)
    saved = checkpoints.resume(seed=seed, rounds=rounds, every=evaluation.every) if checkpoints and resume else None
    if saved:
        policy.restore(saved["policy"])
        progress = Progress.restored(saved, algorithm)
        alarms.restore(saved["alarms"])
    else:
        progress = Progress(algorithm.init(algorithm.model.initial()), Ledger())
    alarms.tell(found)
    run = Run(algorithm, populations, sources, schedule, seed, progress.ledger, policy.books, rounds)
    backend.start(run, saved["backend"] if saved else None)
    began = time.monotonic() - progress.seconds
    finished = progress.round >= rounds or bool(progress.ended)
    while not finished:
        steps = _one_round(run, policy, backend, progress)
        done, params = progress.round, algorithm.params(progress.state)
        diagnostics = dict(algorithm.diagnostics(progress.state)) if steps else {}
        progress.diagnostics += [{"round": done, **diagnostics}] if diagnostics else []
        metrics = evaluation.after(done, rounds, params, backend)
        progress.history += [{"round": done, **metrics}] if metrics else []
        alarms.heard(policy.faults)
        if metrics or done == rounds:
            alarms.evaluated(done, rounds, metrics, params)
        progress.seconds = time.monotonic() - began
        progress.costs += [progress.cost()] if metrics else []
        record = Record(
            *(done, rounds, metrics, progress.ledger.totals(), progress.dropped, params, diagnostics),
            *(alarms.sentences(), progress.history, progress.seconds),
        )
        told = [callback(record) for callback in callbacks]
        progress.ended = " ".join(sentence for sentence in told if isinstance(sentence, str) and sentence)
        stop, finished = should_stop(), done == rounds or bool(progress.ended)
        if checkpoints and (stop or finished or checkpoints.due(done)):
            checkpoints.save(progress.tree(policy, backend) | {"seed": seed, "alarms": alarms.tree()})
        if stop:
            break
    return Result(
        algorithm.params(progress.state),
        progress.history,
        progress.ledger.totals(),
        progress.round,
        time.monotonic() - began,
        seed,
        progress.dropped,
        policy.faults.all(),
        finished,
        progress.diagnostics,
        progress.state,
        backend.clients(),
        alarms.sentences(),
        alarms.broken,
        progress.costs,
        progress.jobs,
        algorithm.model,
        progress.ended,
    )


def _one_round(run: Run, policy: Policy, backend: Backend, progress: Progress) -> int:
    """Messages go down, updates come up, and the server takes its steps; how many these were."""
    algorithm, number = run.algorithm, progress.round
    sizes = {name: len(population) for name, population in run.data.items()}
    server = Server(number, run.seed, algorithm.model, run.central, run.ledger, sizes)
    messages, progress.state = algorithm.broadcast(progress.state, server)
    try:
        outcome = policy.round(backend, messages, number, progress.version)
    except RunStopped:
        if worst(policy.faults.all()) is None:
            require_finite(algorithm, algorithm.params(progress.state), number)
        raise
    steps, joining = outcome.steps, run.schedule.joining
    if joining and algorithm.own.settles and joining.settling(number):
        steps = []
    elif not steps and (not messages or algorithm.lateness.steps_alone):
        steps = [[]]
    for replies in steps:
        progress.state = algorithm.step(progress.state, replies, server)
        if progress.state is None:
            raise InputError(f"The step of {algorithm.name} returns nothing; it must return the next state.")
        progress.version += 1
        server.step += 1
    run.ledger.bytes_kept = max(run.ledger.bytes_kept, tree.nbytes(progress.state))
    progress.dropped += sum(map(len, outcome.dropped.values()))
    progress.jobs += outcome.heard
    progress.round += 1
    return len(steps)
