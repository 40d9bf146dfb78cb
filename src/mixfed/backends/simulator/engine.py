"""The simulator: clients in one process, cohorts as units of work."""

from __future__ import annotations

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
from mixfed.backends.work import bytes_of_own
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
    chosen.
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
    ) -> None:
        check_place(in_flight, "Messages in flight")
        self.chooser = Chooser(executor, threads, chunk, memory, say, chosen or {}, chose)
        self.memory = memory
        self.in_flight = in_flight
        self._private_folder = private_folder
        self._checked: set[str] = set()
        keep_freed_memory()

    def start(self, run: Run, saved: Mapping[str, Any] | None) -> None:
        """Takes up a run, with the executions, the private parts and the messages of its checkpoint if it has one."""
        self.run, self.algorithm, self.ledger = run, run.algorithm, run.ledger
        for source in run.algorithm.batching:
            rows.check_fields(run.algorithm.rows.tables, run.data[source], source)
        untouched = run.algorithm.own.first(run.algorithm.model.initial())
        self.privates = PrivateStore(lambda: untouched, self._private_folder)
        self.chooser.start(run.algorithm, run.data, self.privates, run.ledger)
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
        """All clients' private parts, which are here in one place."""
        return self.privates

    def submit(self, jobs: Jobs, message: Message) -> None:
        """Sends a message to clients; they train when they are collected, and until then the message is kept."""
        source, clients, count = jobs.source, jobs.clients, len(jobs)
        tables = self.algorithm.rows.tables
        self.ledger.bytes_down += tree.nbytes(rows.shared(tables, message.payload)) * count
        if message.examples:
            self.ledger.bytes_down += self._plan(source, clients, message, message.round).bytes_of_extra()
        for part, leaves in (message.first or {}).items():
            self.ledger.bytes_down += tree.nbytes(leaves) * self.privates.lacking(source, part, clients)
        if tables and self._waits:  # else their work tells, in this very round
            self._count_rows(source, clients, message)
        self.chooser.asked(source, count)
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
        groups = jobs.by_round()
        parts = self._parts(groups)
        found = execute(self.algorithm, parts, self.privates, self.chooser.pool) if parts else []
        replies: list[Reply] = []
        dropped: list[int] = []
        norms: dict[int, float] = {}
        for part, gathered in zip(parts, found, strict=True):
            self._count_work(part.plan, part.messages[0])
            for message, one in zip(part.messages, gathered, strict=True):
                self._count(one)
                self._keep(one, jobs.source)
                dropped += one.dropped
                norms |= one.norms
                made = self._replies(one, jobs.source)
                replies += [replace(r, message=message) for r in made] if self.algorithm.rows else made
        return Collected(in_order(replies, jobs) if self.algorithm.uploads == "each" else replies, dropped, norms)

    def discard(self, jobs: Jobs, *, reported: bool) -> None:
        """Forgets these jobs. Clients that reported have trained and keep what is theirs; their uploads are refused."""
        if not reported:
            self.clock.forget(jobs)
            return
        for round, same in jobs.by_round():
            message = self._messages[jobs.source].of(round)
            plan = self._plan(jobs.source, np.sort(same.clients), message, round)
            if message.first or self.privates.keeps_something():
                part = Cohort.alike(message, plan, self.chooser.how(message, plan))
                ((gathered,),) = execute(self.algorithm, [part], self.privates, self.chooser.pool)
                self._keep(gathered, jobs.source)
            self._count_work(plan, message)

    def _parts(self, groups: list[tuple[int, Jobs]]) -> list[Cohort]:
        """A cohort for the clients of each round, or one for all where clients of several rounds can run at once."""
        messages = [self._messages[jobs.source].of(round) for round, jobs in groups]
        members = [np.sort(jobs.clients) for _, jobs in groups]
        mixed = self.algorithm.lateness.same_in_every_round and not self.algorithm.rows and len(groups) > 1
        if not mixed or any(message.examples or message.first for message in messages):
            plans = [
                self._plan(jobs.source, clients, message, round)
                for (round, jobs), clients, message in zip(groups, members, messages, strict=True)
            ]
            for message, plan in zip(messages, plans, strict=True):
                self._check_lookups(message, plan)
            return [Cohort.alike(m, plan, self.chooser.how(m, plan)) for m, plan in zip(messages, plans, strict=True)]
        which = np.repeat(np.arange(len(groups)), [len(clients) for clients in members])
        rounds = np.array([round for round, _ in groups], np.int64)[which]
        whole = self._plan(groups[0][1].source, np.concatenate(members), messages[0], rounds)
        return [Cohort(messages, which, whole, self.chooser.how(messages[0], whole))]

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

    def _count(self, gathered: Gathered) -> None:
        self.ledger.bytes_up += gathered.upload_bytes
        if not self._waits:
            self.ledger.bytes_down += gathered.row_bytes_down
            self.ledger.bytes_up += gathered.id_bytes

    def _keep(self, gathered: Gathered, source: str) -> None:
        for clients, private in gathered.private:
            self.privates.put_all(source, clients, private)
        if self.algorithm.personal is not None and gathered.private and source == CLIENTS:
            parts = tuple(gathered.private[0][1])
            if parts not in self._own_bytes:
                one = tree.map_leaves(lambda x: x[0], gathered.private[0][1])
                self._own_bytes[parts] = bytes_of_own(self.algorithm, one)
            self.ledger.bytes_once = self._own_bytes[parts] * len(self.privates.seen(CLIENTS))

    def _count_rows(self, source: str, clients: NDArray[np.int64], message: Message) -> None:
        """Counts the rows that clients asked for and are sent, whatever becomes of them."""
        plan = self._plan(source, np.sort(clients), message, message.round)
        tables = self.algorithm.rows.tables
        sizes = {t: self.algorithm.model.shapes[t][0] for t in tables}
        for i in range(0, len(plan), _AT_ONCE):
            few = slice(i, min(i + _AT_ONCE, len(plan)))
            batches = plan.chunk(few, self.algorithm.model.device)
            wanted = rows.ask(tables, sizes, batches, plan.clients[few].tolist())
            self.ledger.bytes_down += wanted.bytes_of_rows(message.payload)
            self.ledger.bytes_up += wanted.bytes_of_ids

    def _count_work(self, plan: Plan, message: Message) -> None:
        self.ledger.count_clients(self.chooser.cost(plan, message), int(plan.steps.sum()), int(plan.examples.sum()))
