"""Clocks in the schedule's own time: a virtual one for simulated clients, and a real one for devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from mixfed.core.backend import Reports, Run
from mixfed.core.jobs import Jobs, Times


class VirtualClock:
    """Jobs are reported after the delays of the schedule; the clock starts at 0, and its unit is a round.

    A delay is a function of the seed, the round and the client, so that the times need no place in a checkpoint: they
    are found again from the book of jobs in flight.
    """

    def __init__(self, run: Run) -> None:
        self._schedule, self._seed = run.schedule, run.seed
        self._due: dict[str, tuple[NDArray[np.int64], Times]] = {}
        for book in run.books.values():
            for _, jobs in book.unreported().by_round():
                self.sent(jobs)

    def sent(self, jobs: Jobs) -> None:
        """These jobs, which are of one source and one round, have begun."""
        delays = self._schedule.delays(self._seed, int(jobs.rounds[0]), jobs.source, jobs.clients)
        numbers, times = self._due.get(jobs.source, (np.zeros(0, np.int64), np.zeros(0)))
        self._due[jobs.source] = (
            np.concatenate([numbers, jobs.numbers]),
            np.concatenate([times, jobs.asked + delays]),
        )

    def forget(self, jobs: Jobs) -> None:
        """Nobody waits for these jobs any longer."""
        numbers, times = self._due[jobs.source]
        kept = ~np.isin(numbers, jobs.numbers)
        self._due[jobs.source] = (numbers[kept], times[kept])

    def wait(self, until: float, enough: int) -> Reports:
        """Moves on to the time at which ``enough`` jobs are reported, at most to ``until``, and says which are.

        With ``enough`` = 0 nobody is waited for: the clock moves on to ``until``.
        """
        times = np.sort(np.concatenate([times for _, times in self._due.values()] or [np.zeros(0)]))
        now = min(until, float(times[enough - 1])) if 0 < enough <= len(times) else until
        found: dict[str, tuple[NDArray[np.int64], Times]] = {}
        for source, (numbers, due) in self._due.items():
            come = (due <= now) & np.isfinite(due)
            found[source] = (numbers[come], due[come])
            self._due[source] = (numbers[~come], due[~come])
        return Reports(now, _some(found), over=not any(np.isfinite(due).any() for _, due in self._due.values()))


class RealClock:
    """Real time in the schedule's unit: a round lasts at most so many ``seconds``.

    The clock is set when a round begins. So a round whose clients have all reported ends early, what the server does
    between two rounds takes nothing from the next one, and the policy's rules (what is late, how long a client is
    waited for) hold for real time as they are.
    """

    def __init__(
        self,
        seconds: float,
        *,
        tick: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.seconds, self.tick, self.sleep = seconds, tick, sleep
        self.set(0.0)

    def read(self) -> float:
        """The time in rounds."""
        return self._at + (self.tick() - self._since) / self.seconds

    def set(self, reading: float) -> None:
        """Lets the clock read this."""
        self._at, self._since = reading, self.tick()


def _some(
    found: Mapping[str, tuple[NDArray[np.int64], Times]],
) -> dict[str, tuple[NDArray[np.int64], Times]]:
    return {source: pair for source, pair in found.items() if len(pair[0])}
