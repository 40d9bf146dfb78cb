"""A backend that passes nothing but bytes between the server and its clients, all in this process.

It shows that an algorithm can run over a network: every message is serialised, handed as bytes to a client runtime that
knows nothing of the server or of other clients, and answered with bytes. It is slow and useful for debugging. The
numbers are the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mixfed.backends import wire
from mixfed.backends.clock import VirtualClock
from mixfed.backends.correspondence import Correspondence, Letter, evaluation, mean_of
from mixfed.backends.runtime import ClientRuntime, Measure
from mixfed.core import tree
from mixfed.core.algorithm import CLIENTS, Message, Upload
from mixfed.core.backend import Collected, Question, Reports, Run
from mixfed.core.jobs import Jobs
from mixfed.core.private import PrivateStore
from mixfed.core.tree import Params
from mixfed.data.store import CentralData, FederatedData


class Loopback:
    """Clients behind bytes. ``tests`` are the examples that clients keep apart for evaluations, by name (test,
    validation), and ``measure`` is how they evaluate. ``letters`` counts the bytes that were passed."""

    letters: Correspondence

    def __init__(self, tests: Mapping[str, FederatedData] | None = None, measure: Measure | None = None) -> None:
        self._tests, self._measure = tests or {}, measure
        self.runtimes: dict[tuple[str, int], ClientRuntime] = {}
        self._stores: dict[tuple[str, int], PrivateStore] = {}

    def start(self, run: Run, saved: Mapping[str, Any] | None) -> None:
        """Takes up a run, with the requests in flight and the devices of its checkpoint if it has one."""
        self.run, self.algorithm = run, run.algorithm
        self.letters = Correspondence(run)
        self.runtimes.clear()
        self._stores.clear()
        self._requests: dict[tuple[str, int], Letter] = {}
        if saved is not None:
            self.letters.restore(saved["letters"])
            for source, requests in saved["requests"].items():
                for number, blocks in requests.items():
                    self._requests[source, int(number)] = Letter(*(wire.to_bytes(block) for block in blocks.values()))
            for source, devices in saved["devices"].items():
                for client, private in devices.items():
                    there = tree.to_device(private, run.algorithm.model.device)
                    self._runtime(source, int(client))
                    self._stores[source, int(client)].restore(there)
        self.clock = VirtualClock(run)

    def state(self) -> dict[str, Any]:
        """The requests that have not been delivered, and what every device keeps."""
        requests: dict[str, dict[str, Any]] = {source: {} for source in self.algorithm.batching}
        for (source, number), letter in self._requests.items():
            requests[source][str(number)] = {name: wire.to_tensor(block) for name, block in vars(letter).items()}
        devices: dict[str, dict[str, Any]] = {source: {} for source in self.algorithm.batching}
        for (source, client), store in self._stores.items():
            devices[source][str(client)] = store.tree()
        return {"requests": requests, "devices": devices, "letters": self.letters.state()}

    def clients(self) -> Loopback:
        """The devices, which answer questions; their private parts stay with them."""
        return self

    def submit(self, jobs: Jobs, message: Message) -> None:
        """Asks each client what it needs, and writes its letter, which is delivered when the client is to report."""
        if self.algorithm.rows:
            self.letters.messages[jobs.source].add(message)
        question = self.letters.question(message)
        for client, number in zip(jobs.clients.tolist(), jobs.numbers.tolist(), strict=True):
            answer = self._runtime(jobs.source, client).answer(question) if question else None
            letter = self.letters.letter(jobs.source, client, number, message, question, answer)
            self._requests[jobs.source, number] = letter
        self.clock.sent(jobs)

    def wait(self, until: float, enough: int) -> Reports:
        """Lets virtual time pass."""
        self.letters.forget_messages()
        return self.clock.wait(until, enough)

    def collect(self, jobs: Jobs) -> Collected:
        """Delivers the requests of these jobs and takes what the clients answer, the smallest number first."""
        order = sorted(zip(jobs.clients.tolist(), jobs.numbers.tolist(), strict=True))
        return self.letters.collected(jobs, {number: self._deliver(jobs.source, c, number) for c, number in order})

    def discard(self, jobs: Jobs, *, reported: bool) -> None:
        """Clients that report in vain have trained and keep what is theirs; those that are lost got no request."""
        if not reported:
            self.clock.forget(jobs)
            self.letters.forget(jobs.source, jobs.numbers.tolist())
        for client, number in zip(jobs.clients.tolist(), jobs.numbers.tolist(), strict=True):
            if reported:
                self._deliver(jobs.source, client, number, wanted=False)
            else:
                del self._requests[jobs.source, number]

    def ask(self, params: Params, question: Question) -> dict[str, float]:
        """A federated evaluation: every client answers with sums over its own examples."""
        request = evaluation(params, question)
        return mean_of((self._runtime(CLIENTS, c).answer(request) for c in question.clients.tolist()), question)

    def _runtime(self, source: str, client: int) -> ClientRuntime:
        """The device of a client, which is made when it is first reached."""
        if (source, client) not in self.runtimes:
            untouched = self.algorithm.own.first(self.algorithm.model.initial())
            tests = {
                name: CentralData(data.client(client), data.prepare)
                for name, data in self._tests.items()
                if source == CLIENTS and data.sizes(np.array([client]))[0] > 0
            }
            store = self._stores[source, client] = PrivateStore(lambda: untouched)
            self.runtimes[source, client] = ClientRuntime(
                self.algorithm,
                source,
                client,
                self.run.data[source].select(np.array([client])),
                store,
                tests=tests,
                measure=self._measure,
            )
        return self.runtimes[source, client]

    def _deliver(self, source: str, client: int, number: int, *, wanted: bool = True) -> Upload | None:
        """Hands a letter over and reads the answer; None where the client dropped its update."""
        letter = self._requests.pop((source, number))
        answer = self._runtime(source, client).answer(letter.own, wire.unpack(letter.common))
        return self.letters.read(source, client, number, answer, wanted=wanted)
