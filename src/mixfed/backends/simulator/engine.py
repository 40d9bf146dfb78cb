"""The simulator: clients in one process, cohorts as units of work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mixfed.backends.simulator.choice import Chooser
from mixfed.backends.simulator.executors import Part, Tally, execute, keep_freed_memory
from mixfed.backends.simulator.messages import Parts, Sent, restored, saved
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Reply
from mixfed.core.batches import Plan, plan_cohort
from mixfed.core.jobs import Arrivals
from mixfed.core.ledger import Ledger
from mixfed.core.private import PrivateStore
from mixfed.core.storage import Place, check_place
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.transforms.rows import select as rows
from mixfed.transforms.rows.checks import check_lookups

_AT_ONCE = 64


class Simulator:
    """Runs the clients of an algorithm in this process.

    ``executor`` is loop, vmap, or auto, which times both (see :class:`mixfed.backends.simulator.choice.Chooser`).
    ``threads`` work side by side, as many as pay if left out; ``chunk`` fixes the clients per vmapped chunk. ``memory``
    (bytes) bounds what the clients being run at one time may take, together with the messages to clients in flight;
    ``in_flight`` is where these are kept from the next round on.
    """

    def __init__(
        self,
        executor: str = "auto",
        *,
        threads: int | None = None,
        chunk: int | None = None,
        memory: int = 2 << 30,
        in_flight: Place = "device",
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        check_place(in_flight, "Messages in flight")
        self.chooser = Chooser(executor, threads, chunk, memory, say)
        self.memory = memory
        self.in_flight = in_flight
        self._checked: set[str] = set()
        self._sent: dict[str, dict[int, Sent]] = {}
        self.dropped: list[tuple[str, int]] = []
        keep_freed_memory()

    def start(
        self,
        algorithm: Algorithm,
        data: Mapping[str, FederatedData],
        central: Mapping[str, CentralData],
        privates: PrivateStore,
        seed: int,
        ledger: Ledger,
    ) -> None:
        """Takes up a run."""
        self.algorithm, self.data, self.central = algorithm, data, central
        self.privates, self.seed, self.ledger = privates, seed, ledger
        for source in algorithm.batching:
            rows.check_fields(algorithm.rows, data[source], source)
        self.chooser.start(algorithm, data, privates, ledger)
        self._checked.clear()
        self._sent.clear()
        self.dropped.clear()

    def state(self) -> dict[str, Any]:
        """The executions chosen so far (another one rounds differently), and the messages of jobs in flight."""
        sent = {source: saved(by_round) for source, by_round in self._sent.items()}
        return {**self.chooser.state(), "sent": sent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up the executions and the messages of the run that is resumed."""
        self.chooser.restore(state)
        device = self.algorithm.model.device if self.in_flight == "device" else torch.device("cpu")
        self._sent = {source: restored(kept, device) for source, kept in state["sent"].items()}

    def submit(self, source: str, clients: NDArray[np.int64], message: Message, version: int) -> None:
        """Sends a message to clients; they train when they are collected, and until then the message is kept."""
        alike = rows.shared(self.algorithm.rows, message.payload)
        self.ledger.bytes_down += tree.nbytes(alike) * len(clients)
        if message.examples:
            self.ledger.bytes_down += self._plan(source, clients, message, version).bytes_of_extra()
        for part, leaves in (message.first or {}).items():
            self.ledger.bytes_down += tree.nbytes(leaves) * self.privates.lacking(source, part, clients)
        self.chooser.asked(source, len(clients))
        sent = self._sent.setdefault(source, {})
        if version in sent:
            sent[version] = replace(sent[version], clients=np.concatenate([sent[version].clients, clients]))
        else:
            last = sent[max(sent)].parts if sent else None
            same = last is not None and last.are_those_of(message)
            parts = last if last is not None and same else Parts(message.payload, message.first or {})
            for earlier in sent.values():
                earlier.parts.keep_at(self.in_flight)
            sent[version] = Sent(replace(message, payload={}, first=None), parts, clients)
        self.chooser.memory = self._left()
        if self.chooser.memory < 0:
            raise InputError(
                f"The messages to clients in flight take more than the {self.memory:,} bytes that the simulator may"
                " use; raise simulator.memory, or keep them elsewhere with simulator.in_flight."
            )

    def collect(self, version: int, arrivals: Arrivals | None = None) -> list[Reply]:
        """The replies of these arrivals (left out: of all clients that were sent something, round by round).

        Clients that were sent the same message run as one cohort, the cohorts side by side; of an ageless algorithm all
        of them are one cohort. Uploads that are wanted one by one come in the order of arrival.
        """
        if arrivals is None:
            everyone = [
                Arrivals(source, sent.clients, *[np.full_like(sent.clients, number)] * 2)
                for source, versions in self._sent.items()
                for number, sent in versions.items()
            ]
            return [reply for jobs in everyone for reply in self.collect(version, jobs)]
        groups = arrivals.by_round()
        counted = [self._sent[jobs.source][number].counted for number, jobs in groups]
        parts = self._parts(groups)
        tallies = execute(self.algorithm, parts, self.privates, self.chooser.pool) if parts else []
        for part in parts:
            self._count_work(part.plan, part.messages[0])
        done = [
            pair for part, found in zip(parts, tallies, strict=True) for pair in zip(part.messages, found, strict=True)
        ]
        replies: list[Reply] = []
        for (_, jobs), (message, tally), already in zip(groups, done, counted, strict=True):
            self._count(tally, jobs.source)
            if not already:
                self._count_rows(tally.row_bytes_down, tally.id_bytes)
            found = _replies(tally, jobs.source, version - int(jobs.versions[0]))
            replies += [replace(r, message=message) for r in found] if self.algorithm.rows else found
        if self.algorithm.uploads == "each":
            place = {client: i for i, client in enumerate(arrivals.clients.tolist())}
            replies.sort(key=lambda reply: place[reply.clients[0]])
        return replies

    def _parts(self, groups: list[tuple[int, Arrivals]]) -> list[Part]:
        """A cohort for the clients of each round, or one for all where clients of several rounds can run at once."""
        messages = [self._take(jobs, number) for number, jobs in groups]
        members = [np.sort(jobs.clients) for _, jobs in groups]
        at_once = self.algorithm.ageless and not self.algorithm.rows and len(groups) > 1
        if not at_once or any(message.examples or message.first for message in messages):
            plans = [
                self._plan(jobs.source, clients, message, number)
                for (number, jobs), clients, message in zip(groups, members, messages, strict=True)
            ]
            for message, plan in zip(messages, plans, strict=True):
                self._check_lookups(message, plan)
            return [Part.alike(m, plan, self.chooser.how(m, plan)) for m, plan in zip(messages, plans, strict=True)]
        which = np.repeat(np.arange(len(groups)), [len(clients) for clients in members])
        rounds = np.array([number for number, _ in groups], np.int64)[which]
        whole = self._plan(groups[0][1].source, np.concatenate(members), messages[0], rounds)
        return [Part(messages, which, whole, self.chooser.how(messages[0], whole))]

    def _check_lookups(self, message: Message, plan: Plan) -> None:
        new = self.algorithm.rows and plan.source not in self._checked
        if new and check_lookups(self.algorithm, message, plan, self.privates):
            self._checked.add(plan.source)

    def discard(self, arrivals: Arrivals, *, reported: bool) -> None:
        """Forgets these jobs. Clients that report in vain have trained, which counts, and keep what is theirs; what
        they send up is refused."""
        for number, jobs in arrivals.by_round():
            counted = self._sent[jobs.source][number].counted
            message = self._take(jobs, number)
            if not counted:
                self._count_picked(jobs.source, jobs.clients, message, number)
            if not reported:
                continue
            plan = self._plan(jobs.source, np.sort(jobs.clients), message, number)
            if message.first or self.privates.keeps_something():
                part = Part.alike(message, plan, self.chooser.how(message, plan))
                self._keep(execute(self.algorithm, [part], self.privates, self.chooser.pool)[0][0], jobs.source)
            self._count_work(plan, message)

    def end_round(self) -> None:
        """Counts the rows that went to clients still on their way; those of the others are known from their work."""
        for source, by_round in self._sent.items() if self.algorithm.rows else ():
            for number, sent in by_round.items():
                if not sent.counted:
                    self._count_picked(source, sent.clients, sent.whole(self.algorithm.model.device), number)
                    by_round[number] = replace(sent, counted=True)

    def _take(self, jobs: Arrivals, number: int) -> Message:
        """The message of jobs that are in flight no longer; it is let go with the last of them."""
        sent = self._sent[jobs.source]
        message = sent[number].whole(self.algorithm.model.device)
        if len(jobs.clients) < len(sent[number].clients):
            left = np.setdiff1d(sent[number].clients, jobs.clients, assume_unique=True)
            sent[number] = replace(sent[number], clients=left)
        else:
            del sent[number]
        return message

    def _left(self) -> int:
        """What the memory budget leaves beside the messages of earlier rounds, without the last one, which is the model
        as the server has it."""
        device = self.algorithm.model.device
        if self.in_flight == "disk" or (self.in_flight == "memory" and device.type != "cpu"):
            return self.memory
        left = self.memory
        for by_round in self._sent.values():
            last = by_round[max(by_round)].parts if by_round else None
            earlier = {id(sent.parts): sent.parts for sent in by_round.values() if sent.parts is not last}
            left -= sum(parts.nbytes for parts in earlier.values())
        return left

    def _plan(
        self, source: str, clients: NDArray[np.int64], message: Message, version: int | NDArray[np.int64]
    ) -> Plan:
        sample = message.examples
        if sample and sample.source not in self.central:
            raise InputError(f"Example transfer sends central data '{sample.source}', and the run was given none.")
        central = self.central[sample.source] if sample else None
        batching = self.algorithm.batching[source]
        return plan_cohort(source, self.data[source], clients, batching, self.seed, version, sample, central)

    def _count(self, tally: Tally, source: str) -> None:
        self._keep(tally, source)
        self.dropped += [(source, client) for client in tally.dropped]
        self.ledger.bytes_up += tally.upload_bytes

    def _keep(self, tally: Tally, source: str) -> None:
        for clients, private in tally.private:
            self.privates.put_all(source, clients, private)

    def _count_rows(self, bytes_down: int, id_bytes: int) -> None:
        self.ledger.bytes_down += bytes_down
        self.ledger.bytes_up += id_bytes

    def _count_picked(self, source: str, clients: NDArray[np.int64], message: Message, number: int) -> None:
        """Counts the rows that clients asked for and were sent, whatever became of them."""
        if not self.algorithm.rows:
            return
        plan = self._plan(source, np.sort(clients), message, number)
        for i in range(0, len(plan), _AT_ONCE):
            few = slice(i, min(i + _AT_ONCE, len(plan)))
            batches = plan.chunk(few, self.algorithm.model.device)
            picked = rows.pick(self.algorithm.rows, message.payload, batches, plan.clients[few].tolist())
            self._count_rows(picked.bytes_down, picked.bytes_of_ids)

    def _count_work(self, plan: Plan, message: Message) -> None:
        self.ledger.count_clients(self.chooser.cost(plan, message), int(plan.steps.sum()), int(plan.examples.sum()))


def _replies(tally: Tally, source: str, staleness: int) -> list[Reply]:
    if tally.uploads:
        return [
            Reply(upload.values, float(upload.weight), (client,), source, staleness, upload.rows, _ones(upload.rows))
            for client, upload in sorted(tally.uploads, key=lambda item: item[0])
        ]
    if not tally.used:
        return []
    total = tally.mean()
    ids: dict[str, torch.Tensor] = {}
    touched: dict[str, torch.Tensor] = {}
    if tally.row_sum is not None:
        ids, weights, sums = tally.row_sum.result()
        touched = tree.scale(weights, 1.0 / tally.weight)
        for part, tables in sums.items():
            total[part] = total.get(part, {}) | {t: x.mul_(1.0 / tally.weight) for t, x in tables.items()}
    return [Reply(total, tally.weight, tuple(tally.used), source, staleness, ids, touched)]


def _ones(ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {table: torch.ones(len(i), device=i.device) for table, i in ids.items()}
