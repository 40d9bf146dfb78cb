"""What happens between ``broadcast`` and ``step``: clients are asked, time passes, replies arrive.

The same code serves synchronous and asynchronous training: a synchronous round asks a cohort whose delays are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mixfed.core.algorithm import Algorithm, Message, Reply
from mixfed.core.jobs import Arrivals, InFlight
from mixfed.core.ledger import Ledger
from mixfed.core.private import PrivateStore
from mixfed.core.schedule import Schedule
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError, RunStopped

FEW = 5
"""Fewer updates in a row that are not finite do not stop a run, however small its cohorts are."""


class Backend(Protocol):
    """Where clients run. ``submit`` sends; ``collect`` returns the replies of clients that have come back."""

    dropped: list[tuple[str, int]]

    def start(
        self,
        algorithm: Algorithm,
        data: Mapping[str, FederatedData],
        central: Mapping[str, CentralData],
        privates: PrivateStore,
        seed: int,
        ledger: Ledger,
    ) -> None: ...

    def submit(self, source: str, clients: NDArray[np.int64], message: Message, version: int) -> None: ...

    def collect(self, version: int, arrivals: Arrivals | None = None) -> list[Reply]:
        """The replies of these arrivals (of all clients if left out) at this version of the model."""

    def discard(self, arrivals: Arrivals, *, reported: bool) -> None:
        """Forgets jobs whose replies are not wanted, because they came too late or will never come."""

    def end_round(self) -> None:
        """Counts what went to clients that are still on their way."""

    def state(self) -> dict[str, Any]:
        """What a resumed run must find again to be the same run, as a tree."""

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Exchange:
    """The clients of a run as the loop sees them: messages go in, and the replies for each step come out."""

    def __init__(
        self, algorithm: Algorithm, backend: Backend, schedule: Schedule, sizes: Mapping[str, int], seed: int
    ) -> None:
        if schedule.concurrency and len(algorithm.batching) > 1:
            raise InputError(
                f"The algorithm {algorithm.name} trains on several populations of clients, and a concurrency is for"
                " one only; leave it out."
            )
        self.algorithm, self.backend, self.schedule = algorithm, backend, schedule
        self.discards = (schedule.late or algorithm.late) == "discard"
        self.buffer = schedule.buffer or algorithm.buffer
        if algorithm.in_place and (self.buffer or not schedule.is_synchronous):
            raise InputError(
                "A table that is written in place changes under clients that are still at work; leave out in_place, or"
                " delays, buffer and concurrency."
            )
        self.flights = {source: InFlight(schedule, seed, source, sizes[source]) for source in algorithm.batching}

    def round(self, messages: Mapping[str, Message], number: int, version: int) -> list[list[Reply]]:
        """Asks clients and returns the replies for one step after another; ``version`` counts the steps before."""
        if self.schedule.concurrency:
            arrived = [self._until_full(source, message, number, version) for source, message in messages.items()]
        else:
            for flight in self.flights.values():
                self._give_up(flight.advance(number))
            for source, message in messages.items():
                self._ask(source, message, number, version, self.schedule.size(source))
            arrived = [self._of_this_round(flight, number) for flight in self.flights.values()]
            if self.flights and all(flight.stuck(number + 1) for flight in self.flights.values()):
                raise RunStopped(self._nobody_reports(number))
        arrived = [jobs for jobs in arrived if len(jobs)]
        steps = list(self._steps(arrived, version))
        self.backend.end_round()
        for jobs in arrived:
            self._stop_if_hopeless(jobs, number)
        return [replies for replies in steps if replies]

    def tree(self) -> dict[str, Any]:
        """All jobs in flight as a tree."""
        return {source: flight.tree() for source, flight in self.flights.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes up the jobs of a checkpoint."""
        for source, flight in self.flights.items():
            flight.restore(saved[source])

    def _steps(self, arrived: list[Arrivals], version: int) -> Iterator[list[Reply]]:
        """Every population fills a buffer of its own; a step takes the next full one of each that has one."""
        size = self.buffer
        if not size or not arrived:
            yield [reply for jobs in arrived for reply in self.backend.collect(version, jobs)]
            return
        buffers = [[jobs[i : i + size] for i in range(0, len(jobs), size)] for jobs in arrived]
        steps = [[jobs for jobs in full if jobs is not None] for full in zip_longest(*buffers)]
        if self.algorithm.uploads == "sum":
            for i, full in enumerate(steps):
                yield [reply for jobs in full for reply in self.backend.collect(version + i, jobs)]
            return
        collected = [reply for jobs in arrived for reply in self.backend.collect(version, jobs)]
        replies = {(reply.source, reply.clients[0]): reply for reply in collected}
        for i, full in enumerate(steps):
            wanted = [(jobs.source, client) for jobs in full for client in jobs.clients.tolist()]
            yield [replies[key].delayed(i) for key in wanted if key in replies]

    def _stop_if_hopeless(self, jobs: Arrivals, number: int) -> None:
        """Stops where as many updates in a row as a cohort has (at least ``FEW``) had a number that is not finite.

        A single client with bad data stops nothing, though a step be made of one update; a model that has diverged has
        no good update left.
        """
        flight = self.flights[jobs.source]
        bad = np.isin(jobs.clients, [client for source, client in self.backend.dropped if source == jobs.source])
        flight.bad = flight.bad + len(jobs) if bad.all() else int(np.argmin(bad[::-1]))
        if flight.bad >= max(FEW, self.schedule.size(jobs.source)):
            raise RunStopped(
                f"The last {flight.bad} updates of the clients '{jobs.source}' all had a number that is not finite, so"
                f" the run stopped in round {number + 1}; lower the learning rate or clip the gradients."
            )

    def _nobody_reports(self, number: int) -> str:
        names = ", ".join(f"'{source}'" for source in self.flights)
        return (
            f"All clients of {names} are busy and none of them will ever report, so the run stopped in round"
            f" {number + 1}; give the schedule a patience after which clients are given up, or a smaller buffer."
        )

    def _never_full(self, flight: InFlight, number: int, came: int, size: int) -> str:
        if flight.exhausted:
            return (
                f"All clients of '{flight.source}' have been asked, and only {came} of the {size} updates that make a"
                f" step have come, so the run stopped in round {number + 1}; choose a smaller buffer."
            )
        return (
            f"The {len(flight)} clients of '{flight.source}' that are busy will never report, so the run stopped in"
            f" round {number + 1}; give the schedule a patience after which clients are given up."
        )

    def _of_this_round(self, flight: InFlight, number: int) -> Arrivals:
        if self.discards:
            self.backend.discard(flight.late(number, number, number + 1), reported=True)
        return flight.arrived(number + 1, multiple=self.buffer or 1)

    def _until_full(self, source: str, message: Message, number: int, version: int) -> Arrivals:
        """Keeps ``concurrency`` clients busy until the buffer is full.

        Who arrives at the same time as the last one stays in flight, and counts for the next round.
        """
        flight, size = self.flights[source], self.buffer or self.schedule.size(source)
        began = float(np.nextafter(flight.now, np.inf))
        arrived: list[Arrivals] = []
        while (missing := size - sum(map(len, arrived))) > 0:
            self._ask(source, message, number, version, self.schedule.concurrency - len(flight))
            time = flight.next_event()
            if not np.isfinite(time):
                raise RunStopped(self._never_full(flight, number, size - missing, size))
            self._give_up(flight.advance(time))
            at_once = float(np.nextafter(flight.now, np.inf))
            if self.discards:
                self.backend.discard(flight.late(number, began, at_once), reported=True)
            arrived.append(flight.arrived(at_once, limit=missing))
        return Arrivals.joined(arrived)

    def _ask(self, source: str, message: Message, number: int, version: int, size: int) -> None:
        flight = self.flights[source]
        clients = flight.choose(number, size)
        if len(clients):
            flight.send(clients, number, version)
            self.backend.submit(source, clients, message, number)

    def _give_up(self, lost: Arrivals) -> None:
        if len(lost):
            self.backend.discard(lost, reported=False)
