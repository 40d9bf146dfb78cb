"""The simulator: clients in one process, cohorts as units of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.backends.aggregate import in_order, single
from mixfed.backends.clock import VirtualClock
from mixfed.backends.messages import Messages
from mixfed.backends.simulator.choice import Chooser
from mixfed.backends.simulator.executors import Cohort, execute, keep_freed_memory
from mixfed.backends.simulator.gathered import Gathered
from mixfed.backends.simulator.ordered import UNIT, Ladder, execute_in_order
from mixfed.backends.simulator.team import Alone, Found, Team
from mixfed.backends.work import bytes_of_own, keeps_parts
from mixfed.core import tree
from mixfed.core.algorithm import CLIENTS, Message, Reply
from mixfed.core.backend import Collected, Reports, Run
from mixfed.core.batches import Plan, plan_cohort
from mixfed.core.jobs import Jobs
from mixfed.core.private import PrivateStore
from mixfed.core.storage import Place, check_place
from mixfed.errors import InputError
from mixfed.transforms.rows import select as rows
from mixfed.transforms.rows.checks import check_lookups

_AT_ONCE = 64


class Simulator:
    """Runs the clients of an algorithm in this process.

    ``executor`` is loop, vmap, factored, or auto, which times the others (see
    :class:`mixfed.backends.simulator.choice.Chooser`). ``threads`` work side by side, as many as pay if left out;
    ``chunk`` fixes the clients per batched chunk. ``memory`` (bytes) bounds what the clients being run at one time may
    take, together with the messages to clients in flight; ``in_flight`` is where these are kept from the next round on.
    What clients keep to themselves is in memory, or on disk in ``private_folder``. ``chosen`` are the executions that
    auto chose in an earlier run, by source, which make this run repeat its bytes, and ``chose`` is told of each that is
    chosen. A ``team`` of processes simulates together. With ``deterministic_sum`` the order of all
    additions is fixed whatever the threads and the team (:mod:`mixfed.backends.simulator.ordered`).
    """

    def __init__(
        self,
        executor: str = "auto",
        *,
        threads: int | None = None,
        chunk: int | None = None,
        memory: int = 2 << 30,
        in_flight: Place = "device",
        private_folder: str | Path | None = None,
        chosen: Mapping[str, str] | None = None,
        chose: Callable[[str, str], None] = lambda source, execution: None,
        say: Callable[[str], None] = lambda sentence: None,
        team: Team | None = None,
        deterministic_sum: bool = False,
    ) -> None:
        check_place(in_flight, "Messages in flight")
        if deterministic_sum:
            executor, threads, chunk = "loop" if executor == "auto" else executor, 1, chunk or UNIT
        self.chooser = Chooser(executor, threads, chunk, memory, say, chosen or {}, chose)
        self.deterministic_sum = deterministic_sum
        self.memory = memory
        self.in_flight = in_flight
        self.team: Team = team or Alone()
        self._private_folder = private_folder
        self._checked: set[str] = set()
        keep_freed_memory()

    def start(self, run: Run, saved: Mapping[str, Any] | None) -> None:
        """Takes up a run, with the executions, the private parts and the messages of its checkpoint if it has one."""
        self.run, self.algorithm, self.ledger = run, run.algorithm, run.ledger
        for source in run.algorithm.batching:
            rows.check_fields(run.algorithm.rows.tables, run.data[source], source)
        untouched = run.algorithm.own.first(run.algorithm.model.initial())
        if self.deterministic_sum and self.chooser.executor != "loop" and keeps_parts(run.algorithm):
            raise InputError(
                f"Clients of {run.algorithm.name} keep something from round to round, so with a deterministic sum they"
                " run one by one; choose the executor loop."
            )
        self.team.start(run)
        self.privates = self.team.privates(lambda: untouched, self._private_folder)
        self.chooser.start(run, self.privates, alone=isinstance(self.team, Alone))
        self._checked.clear()
        self._own_bytes: dict[tuple[str, ...], int] = {}
        self._waits = not run.schedule.is_synchronous or bool(run.algorithm.lateness.buffer)
        device = run.algorithm.model.device
        self._messages = {source: Messages(self.in_flight, device) for source in run.algorithm.batching}
        if saved is not None:
            self.chooser.restore(saved)
            self.privates.restore(tree.to_device(saved["private"], device))
            for source, messages in self._messages.items():
                messages.restore(saved["messages"][source])
        self.clock = VirtualClock(run)

    def state(self) -> dict[str, Any]:
        """The executions chosen so far (another one rounds differently), private parts, and messages in flight."""
        self._forget_messages()
        messages = {source: messages.tree() for source, messages in self._messages.items()}
        return {**self.chooser.state(), "messages": messages, "private": self.privates.tree()}

    def clients(self) -> PrivateStore:
        """All clients' private parts, which are here in one place, or those of the clients that a team left here."""
        return self.privates

    def submit(self, jobs: Jobs, message: Message) -> None:
        """Sends a message to clients; they train when they are collected, and until then the message is kept."""
        source, clients, count = jobs.source, jobs.clients, len(jobs)
        tables = self.algorithm.rows.tables
        self.ledger.bytes_down += tree.nbytes(rows.shared(tables, message.payload)) * count
        for part, leaves in (message.first or {}).items():
            self.ledger.bytes_down += tree.nbytes(leaves) * self.privates.lacking(source, part, clients)
        if message.examples or (tables and self._waits):
            self._add(self.team.counted(jobs, lambda own: self._sent(own, message)))
        self.chooser.asked(source, count, message.round)
        self.clock.sent(jobs)
        self._messages[source].add(message)
        self.chooser.memory = self.memory - sum(messages.nbytes for messages in self._messages.values())
        if self.chooser.memory < 0:
            raise InputError(
                f"The messages to clients in flight take more than the {self.memory:,} bytes that the simulator may"
                " use; give it more memory, or keep these messages in memory or on disk (in_flight)."
            )

    def wait(self, until: float, enough: int) -> Reports:
        """Lets virtual time pass."""
        self._forget_messages()
        return self.clock.wait(until, enough)

    def collect(self, jobs: Jobs) -> Collected:
        """Trains the clients of these jobs.

        Clients that were sent the same message run as one cohort, the cohorts side by side; of an algorithm whose
        clients do the same in every round all of them are one cohort.
        """
        self.team.choose(jobs, self.chooser, self._largest)
        replies: list[Reply] = []
        dropped: list[int] = []
        norms: dict[int, float] = {}
        found = self._in_order(jobs) if self.deterministic_sum else self.team.gathered(jobs, self._train)
        for round, one in found.items():
            self._count(one, jobs.source)
            dropped += one.dropped
            norms |= one.norms
            made = self._replies(one, jobs.source)
            message = self._messages[jobs.source].of(round) if self.algorithm.rows else None
            replies += [replace(reply, message=message) for reply in made] if message else made
        return Collected(in_order(replies, jobs) if self.algorithm.uploads == "each" else replies, dropped, norms)

    def discard(self, jobs: Jobs, *, reported: bool) -> None:
        """Forgets these jobs. Clients that reported have trained and keep what is theirs; their uploads are refused."""
        if not reported:
            self.clock.forget(jobs)
            return
        self.team.choose(jobs, self.chooser, self._largest)
        for one in self.team.gathered(jobs, self._train_in_vain).values():
            self._count(one, jobs.source)

    def _train(self, jobs: Jobs) -> Found:
        """What the clients of these jobs do; they keep what is theirs."""
        parts = self._parts(jobs.by_round())
        began = time.perf_counter()
        done = execute(self.algorithm, parts, self.privates, self.chooser.pool)
        if len(parts) == 1:
            self.chooser.took(parts[0], time.perf_counter() - began)
        found: Found = {}
        for part, gathered in zip(parts, done, strict=True):
            for number, one in enumerate(gathered):
                self._keep(one, jobs.source)
                self._count_work(one, part.plan, part.messages[number], part.which == number)
                found[part.messages[number].round] = one
        return found

    def _in_order(self, jobs: Jobs) -> Found:
        """The same as a sum whose order is fixed: each member of the team has a stretch of every round's clients."""
        found: dict[int, Ladder] = {}
        for round, same in jobs.by_round():
            message, whole = self._planned(same)
            how = self.chooser.how(message, whole)
            own = self.team.stretch(jobs.source, whole.clients, how.chunk or 1)
            if own.start == own.stop:
                continue
            plan = whole.stretch(own)
            self._check_lookups(message, plan)
            part = Cohort.alike(message, plan, how)
            part = part.convolved() if self.algorithm.model.has_convolutions and not how.chunk else part
            cost = self.chooser.cost(plan, message)
            found[round] = execute_in_order(self.algorithm, part, own.start, self.privates, cost)
            for *_, node in found[round].nodes:
                self._keep(node, jobs.source)
        return self.team.in_order(jobs, found)

    def _train_in_vain(self, jobs: Jobs) -> Found:
        """The same for clients whose uploads are refused; only those that keep something have to be simulated."""
        found: Found = {}
        for round, same in jobs.by_round():
            message, plan = self._planned(same)
            one = Gathered(each=False)
            if message.first or self.privates.keeps_something():
                part = Cohort.alike(message, plan, self.chooser.how(message, plan))
                ((trained,),) = execute(self.algorithm, [part], self.privates, self.chooser.pool)
                self._keep(trained, jobs.source)
                one = Gathered(each=False, kept=trained.kept, own_bytes=trained.own_bytes, dropped=trained.dropped)
            self._count_work(one, plan, message, np.ones(len(plan), np.bool_))
            found[round] = one
        return found

    def _planned(self, jobs: Jobs) -> tuple[Message, Plan]:
        """The message of jobs of one round, and their clients' batches."""
        round = int(jobs.rounds[0])
        message = self._messages[jobs.source].of(round)
        return message, self._plan(jobs.source, np.sort(jobs.clients), message, round)

    def _largest(self, jobs: Jobs) -> tuple[Message, Plan]:
        """The same of the round with the most of the jobs."""
        return self._planned(max((same for _, same in jobs.by_round()), key=len))

    def _parts(self, groups: list[tuple[int, Jobs]]) -> list[Cohort]:
        """A cohort for the clients of each round, or one for all where clients of several rounds can run at once."""
        mixed = self.algorithm.lateness.same_in_every_round and not self.algorithm.rows and len(groups) > 1
        messages = [self._messages[jobs.source].of(round) for round, jobs in groups] if mixed else []
        if not mixed or any(message.examples or message.first for message in messages):
            planned = [self._planned(jobs) for _, jobs in groups]
            for message, plan in planned:
                self._check_lookups(message, plan)
            return [Cohort.alike(message, plan, self.chooser.how(message, plan)) for message, plan in planned]
        members = [np.sort(jobs.clients) for _, jobs in groups]
        which = np.repeat(np.arange(len(groups)), [len(clients) for clients in members])
        rounds = np.array([round for round, _ in groups], np.int64)[which]
        whole = self._plan(groups[0][1].source, np.concatenate(members), messages[0], rounds)
        return [Cohort(messages, which, whole, self.chooser.how(messages[0], whole, len(messages)))]

    def _replies(self, gathered: Gathered, source: str) -> list[Reply]:
        if gathered.uploads:
            in_order = sorted(gathered.uploads, key=lambda item: item[0])
            return [single(client, upload, source) for client, upload in in_order]
        mean = gathered.sum.result(source)
        return [] if mean is None else [mean]

    def _check_lookups(self, message: Message, plan: Plan) -> None:
        new = self.algorithm.rows and plan.source not in self._checked
        if new and check_lookups(self.algorithm, message, plan, self.privates):
            self._checked.add(plan.source)

    def _forget_messages(self) -> None:
        for source, messages in self._messages.items():
            messages.keep_only(self.run.books[source].rounds())

    def _plan(self, source: str, clients: NDArray[np.int64], message: Message, round: int | NDArray[np.int64]) -> Plan:
        sample = message.examples
        if sample and sample.source not in self.run.central:
            raise InputError(f"Example transfer sends central data '{sample.source}', and the run was given none.")
        central = self.run.central[sample.source] if sample else None
        batching = self.algorithm.batching[source]
        return plan_cohort(source, self.run.data[source], clients, batching, self.run.seed, round, sample, central)

    def _count(self, gathered: Gathered, source: str) -> None:
        self._add({"client_examples": gathered.examples, "client_flops": gathered.flops})
        self._add({"bytes_up": gathered.upload_bytes})
        if not self._waits:
            self._add({"bytes_down": gathered.row_bytes_down, "bytes_up": gathered.id_bytes})
        if gathered.own_bytes and source == CLIENTS:
            self.ledger.bytes_once = gathered.own_bytes * len(self.privates.seen(CLIENTS))

    def _add(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            setattr(self.ledger, name, getattr(self.ledger, name) + count)

    def _keep(self, gathered: Gathered, source: str) -> None:
        """Takes what clients keep out of what was gathered."""
        for clients, private in gathered.private:
            self.privates.put_all(source, clients, private)
        if gathered.private:
            _, private = gathered.private[0]
            gathered.kept = tuple(private)
            if self.algorithm.personal is not None and gathered.kept not in self._own_bytes:
                one = tree.map_leaves(lambda x: x[0], private)
                self._own_bytes[gathered.kept] = bytes_of_own(self.algorithm, one)
            gathered.own_bytes = self._own_bytes.get(gathered.kept, 0)
        gathered.private = []

    def _sent(self, jobs: Jobs, message: Message) -> dict[str, int]:
        """The bytes of central examples and of rows of tables, which differ from client to client."""
        plan = self._plan(jobs.source, np.sort(jobs.clients), message, message.round)
        down, up = plan.bytes_of_extra(), 0
        tables = self.algorithm.rows.tables if self._waits else {}  # else their work tells, in this very round
        sizes = {t: self.algorithm.model.shapes[t][0] for t in tables}
        for i in range(0, len(plan) if tables else 0, _AT_ONCE):
            few = slice(i, min(i + _AT_ONCE, len(plan)))
            batches = plan.chunk(few, self.algorithm.model.device)
            wanted = rows.ask(tables, sizes, batches, plan.clients[few].tolist())
            down += wanted.bytes_of_rows(message.payload)
            up += wanted.bytes_of_ids
        return {"bytes_down": down, "bytes_up": up}

    def _count_work(self, gathered: Gathered, plan: Plan, message: Message, chosen: NDArray[np.bool_]) -> None:
        """Counts the steps and examples of the chosen clients of a plan at the measured cost of a step."""
        gathered.examples = int(plan.examples[chosen].sum())
        gathered.flops = self.chooser.cost(plan, message).flops(int(plan.steps[chosen].sum()), gathered.examples)
