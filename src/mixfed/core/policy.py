"""What happens between ``broadcast`` and ``step``: clients are asked, time passes, updates are taken.

The policy decides whom to ask, how many updates make a step, what becomes of late ones and for how long a client is
waited for. It is the same for every backend: it asks the backend who has reported, and never looks at a clock itself.
A synchronous round is the case in which everyone who is asked reports in the same round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from mixfed.core.algorithm import Algorithm, Message, Reply
from mixfed.core.backend import Backend
from mixfed.core.faults import FEW, Faults, suggested_bound, worst
from mixfed.core.jobs import JobBook, Jobs, Numbers, Times
from mixfed.core.schedule import Schedule, sample_cohort
from mixfed.errors import InputError, RunStopped

MOST_NOTED = 400
"""Of so many jobs a run remembers when they were asked and reported."""


@dataclass
class Outcome:
    """What a round brought: the replies of one step after another, by source the norms of the updates and the clients
    whose update was dropped, and when clients were asked and heard."""

    steps: list[list[Reply]]
    dropped: dict[str, list[int]] = field(default_factory=dict)
    norms: dict[str, dict[int, float]] = field(default_factory=dict)
    heard: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _ThisRound:
    """Who was asked or taken in the round, and how often clients were drawn in it."""

    round: int = -1
    clients: set[int] = field(default_factory=set)
    draws: int = 0


class Policy:
    """The clients of a run as the loop sees them: messages go in, and the replies for each step come out."""

    def __init__(self, algorithm: Algorithm, schedule: Schedule, sizes: Mapping[str, int], seed: int) -> None:
        if schedule.concurrency and len(algorithm.batching) > 1:
            raise InputError(
                f"The algorithm {algorithm.name} trains on several populations of clients, and a concurrency is for"
                " one only; leave it out."
            )
        self.algorithm, self.schedule, self.sizes, self.seed = algorithm, schedule, sizes, seed
        self.discards = (schedule.late or algorithm.lateness.late) == "discard"
        self.buffer = schedule.buffer or algorithm.lateness.buffer
        if algorithm.rows.in_place and (self.buffer or not schedule.is_synchronous):
            raise InputError(
                "A table that is written in place changes under clients that are still at work; leave out in_place, or"
                " delays, buffer and concurrency."
            )
        self.now = 0.0
        self.faults = Faults()
        self.noted = 0
        self.heard: list[dict[str, Any]] = []
        """Who was heard in this round, of the first jobs of a run with late clients."""
        self.books = {source: JobBook(source) for source in algorithm.batching}
        self._this_round = {source: _ThisRound() for source in self.books}

    def round(self, backend: Backend, messages: Mapping[str, Message], number: int, version: int) -> Outcome:
        """Asks clients and returns the replies for one step after another; ``version`` counts the steps before."""
        if self.schedule.concurrency:
            taken = [self._until_full(backend, source, m, number, version) for source, m in messages.items()]
        else:
            taken = self._for_a_round(backend, messages, number, version)
        taken = [jobs for jobs in taken if len(jobs)]
        outcome = Outcome([], heard=self.heard)
        self.heard = []
        for replies in self._steps(backend, taken, version, outcome):
            outcome.steps += [replies] if replies else []
        for jobs in taken:
            dropped = outcome.dropped.get(jobs.source, [])
            self.faults.note(jobs.source, number, outcome.norms.get(jobs.source, {}), dropped)
            self._stop_if_hopeless(jobs, dropped, number)
        for book in self.books.values():
            book.end_round()
        return outcome

    def tree(self) -> dict[str, Any]:
        """The time, all jobs in flight and the faults so far as a tree."""
        books = {source: book.tree() for source, book in self.books.items()}
        return {"now": self.now, "noted": self.noted, "books": books, "faults": self.faults.tree()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes up the jobs of a checkpoint."""
        self.now, self.noted = float(saved["now"]), int(saved["noted"])
        self.faults.restore(saved["faults"])
        for source, book in self.books.items():
            book.restore(saved["books"][source])

    def _for_a_round(self, backend: Backend, messages: Mapping[str, Message], number: int, version: int) -> list[Jobs]:
        """Asks a cohort of every population, lets a unit of time pass, and gives what was reported in it."""
        self.now = max(self.now, number)
        self._hear(backend, self.now, 0)
        for source in self.books:
            self._give_up(backend, source)
        for source, message in messages.items():
            self._ask(backend, source, message, number, version, self.schedule.size(source))
        waiting = sum(len(book.unreported()) for book in self.books.values())
        over = self._hear(backend, _just_before(number + 1), waiting)
        for source, book in self.books.items():
            if self.discards:
                self._discard(backend, source, book.take_late(number, number, number + 1))
        taken = [book.reported(number + 1, multiple=self.buffer or 1) for book in self.books.values()]
        stuck = (self._is_stuck(book, len(jobs), over) for book, jobs in zip(self.books.values(), taken, strict=True))
        if self.books and all(stuck):
            raise RunStopped(self._nobody_reports(number))
        return taken

    def _until_full(self, backend: Backend, source: str, message: Message, number: int, version: int) -> Jobs:
        """Keeps ``concurrency`` clients busy until the buffer is full.

        Who reports at the same time as the last one stays in flight, and counts for the next round.
        """
        book, size = self.books[source], self.buffer or self.schedule.size(source)
        began, patience = _just_after(self.now), self.schedule.patience or np.inf
        taken: list[Jobs] = []
        while (missing := size - sum(map(len, taken))) > 0:
            self._ask(backend, source, message, number, version, self.schedule.concurrency - len(book))
            if not len(book.reported(_just_after(self.now))):
                until = book.first_asked() + patience
                over = self._hear(backend, until, 1)
                if over and not np.isfinite(until) and not len(book.reported(_just_after(self.now))):
                    raise RunStopped(self._never_full(book, number, size - missing, size))
            self._give_up(backend, source)
            if self.discards:
                self._discard(backend, source, book.take_late(number, began, _just_after(self.now)))
            news = book.reported(_just_after(self.now), limit=missing)
            self._take(source, news)
            taken.append(news)
        return _joined(taken)

    def _steps(self, backend: Backend, taken: list[Jobs], version: int, outcome: Outcome) -> Iterator[list[Reply]]:
        """Every population fills a buffer of its own; a step takes the next full one of each that has one."""

        def collected(jobs: Jobs, at: int) -> list[Reply]:
            self._take(jobs.source, jobs)
            found = backend.collect(jobs)
            outcome.dropped.setdefault(jobs.source, []).extend(found.dropped)
            outcome.norms.setdefault(jobs.source, {}).update(found.norms)
            started = dict(zip(jobs.clients.tolist(), jobs.versions.tolist(), strict=True))
            return [replace(reply, staleness=at - started[reply.clients[0]]) for reply in found.replies]

        size = self.buffer
        if not size or not taken:
            yield [reply for jobs in taken for reply in collected(jobs, version)]
            return
        buffers = [[jobs[i : i + size] for i in range(0, len(jobs), size)] for jobs in taken]
        steps = [[jobs for jobs in full if jobs is not None] for full in zip_longest(*buffers)]
        if self.algorithm.uploads == "sum":
            for i, full in enumerate(steps):
                yield [reply for jobs in full for reply in collected(jobs, version + i)]
            return
        replies = {(r.source, r.clients[0]): r for jobs in taken for r in collected(jobs, version)}
        for i, full in enumerate(steps):
            wanted = [(jobs.source, client) for jobs in full for client in jobs.clients.tolist()]
            found = [replies[key] for key in wanted if key in replies]
            yield [replace(reply, staleness=reply.staleness + i) for reply in found]

    def _ask(self, backend: Backend, source: str, message: Message, number: int, version: int, size: int) -> None:
        clients = self._choose(source, number, size)
        if len(clients):
            self._this_round[source].clients |= set(clients.tolist())
            backend.submit(self.books[source].add(clients, number, version, self.now), message)

    def _choose(self, source: str, round: int, size: int) -> Numbers:
        """Clients to ask: none that is busy, and none that was asked or taken in this round before."""
        if self._this_round[source].round != round:
            self._this_round[source] = _ThisRound(round)
        this_round, population = self._this_round[source], self.sizes[source]
        if size < 1:
            return np.zeros(0, np.int64)
        if self.schedule.joining:
            return self.schedule.joining.cohort(self.seed, round, source, population, size)
        busy = this_round.clients | self.books[source].clients()
        this_round.draws += 1
        return sample_cohort(self.seed, round, source, population, size, busy, this_round.draws - 1)

    def _hear(self, backend: Backend, until: float, enough: int) -> bool:
        """Lets time pass and notes who has reported; whether no other job will ever be reported."""
        reports = backend.wait(until, enough)
        self.now = max(self.now, reports.now)
        for source, (numbers, times) in reports.jobs.items():
            self.books[source].mark(numbers, times)
            self._remember(self.books[source].of(numbers), times)
        for source, numbers in reports.lost.items():
            self._discard(backend, source, self.books[source].strike(numbers), reported=False)
        return reports.over

    def _remember(self, jobs: Jobs, times: Times) -> None:
        """Notes when the first clients of a run were asked and reported, where they may be late."""
        if self.schedule.is_synchronous or self.noted >= MOST_NOTED:
            return
        self.noted += len(jobs)
        for client, asked, reported in zip(jobs.clients.tolist(), jobs.asked.tolist(), times.tolist(), strict=True):
            self.heard.append({"source": jobs.source, "client": client, "asked": asked, "reported": reported})

    def _take(self, source: str, jobs: Jobs) -> None:
        self.books[source].take(jobs)
        self._this_round[source].clients |= set(jobs.clients.tolist())

    def _give_up(self, backend: Backend, source: str) -> None:
        lost = self.books[source].give_up(self.schedule.patience or np.inf, self.now)
        self._discard(backend, source, lost, reported=False)

    def _discard(self, backend: Backend, source: str, jobs: Jobs, *, reported: bool = True) -> None:
        if len(jobs):
            self._this_round[source].clients |= set(jobs.clients.tolist())
            backend.discard(jobs, reported=reported)

    def _is_stuck(self, book: JobBook, leaving: int, over: bool) -> bool:
        """Whether nothing changes any more: all clients are busy, and nobody reports or is given up."""
        waiting = len(book.unreported())
        return len(book) - leaving >= self.sizes[book.source] and (not waiting or (over and not self.schedule.patience))

    def _stop_if_hopeless(self, jobs: Jobs, dropped: Sequence[int], number: int) -> None:
        """Stops where as many updates in a row as a cohort has (at least ``FEW``) were dropped.

        A single client with bad data stops nothing, though a step be made of one update; a model that has diverged has
        no good update left.
        """
        book = self.books[jobs.source]
        bad = np.isin(jobs.clients, dropped)
        book.bad = book.bad + len(jobs) if bad.all() else int(np.argmin(bad[::-1]))
        if book.bad >= max(FEW, self.schedule.size(jobs.source)):
            raise RunStopped(self._hopeless(book, number))

    def _hopeless(self, book: JobBook, number: int) -> str:
        last = f"The last {book.bad} updates of the clients '{book.source}'"
        if any(fault.kind == "unusable" and fault.source == book.source for fault in self.faults.all()):
            return f"{last} could not be used, so the run stopped in round {number + 1}; it was told why for each."
        bound = self.algorithm.bound
        what = "a number that is not finite" + (f" or a norm beyond the bound of {bound:g}" if bound else "")
        absurd = worst(self.faults.all())
        way_out = ("raise the bound, " if bound else "") + "lower the learning rate or clip the gradients"
        if absurd is not None:
            way_out = (
                f"client {absurd.client} of '{absurd.source}' had sent an update {absurd.ratio:.0e} times as long as"
                f" the median of round {absurd.round}, so bound the norm of updates, at {suggested_bound(absurd):g} say"
            )
        return f"{last} all had {what}, so the run stopped in round {number + 1}; {way_out}."

    def _nobody_reports(self, number: int) -> str:
        names = ", ".join(f"'{source}'" for source in self.books)
        return (
            f"All clients of {names} are busy and none of them will ever report, so the run stopped in round"
            f" {number + 1}; give the schedule a patience after which clients are given up, or a smaller buffer."
        )

    def _never_full(self, book: JobBook, number: int, came: int, size: int) -> str:
        if len(self._this_round[book.source].clients | book.clients()) >= self.sizes[book.source]:
            return (
                f"All clients of '{book.source}' have been asked, and only {came} of the {size} updates that make a"
                f" step have come, so the run stopped in round {number + 1}; choose a smaller buffer."
            )
        return (
            f"The {len(book)} clients of '{book.source}' that are busy will never report, so the run stopped in"
            f" round {number + 1}; give the schedule a patience after which clients are given up."
        )


def _just_after(time: float) -> float:
    """The next number after a time: what is before it includes the time itself."""
    return float(np.nextafter(time, np.inf))


def _just_before(time: float) -> float:
    """The last number before a time."""
    return float(np.nextafter(time, -np.inf))


def _joined(parts: list[Jobs]) -> Jobs:
    columns = ("clients", "rounds", "versions", "numbers", "asked")
    return Jobs(parts[0].source, *(np.concatenate([getattr(p, name) for p in parts]) for name in columns))
