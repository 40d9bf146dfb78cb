"""Which of several executions is the fastest, found out in a small share of a run's time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mixfed.backends.simulator.execution import Execution
from mixfed.errors import InputError

SHARE = 0.05
"""How much of the time that a run is expected to take may be spent on choosing."""

FEW, SOME = 2, 8
"""So many clients show whether an execution works at all, and how long all of them will take."""

HOPELESS = 1.5
"""What is going to take so many times as long as the best is not timed on all clients."""

LOST = 3.0
"""What is going to take so many times as long as the best is not tried in other threads or chunks either."""

CLOSE = 1.3
"""What takes no more than so many times as long as the best is timed twice more."""

WINDOW = 5
SURPRISE = 1.5
"""Clients that take so many times longer, or shorter, than measured are a surprise: the machine was or is busy."""


@dataclass
class Race:
    """Times executions of the same ``clients``, the most promising first.

    ``attempt(how, n)`` runs the first n of them and throws the results away. ``work`` is how many clients the run
    trains in all its rounds. An execution is tried as long as what was ``spent`` is within ``SHARE`` of the time that
    all this work takes at the best ``pace`` so far, in seconds a client. ``refused`` hears of executions that fail.
    """

    attempt: Callable[[Execution, int], None]
    clients: int
    work: float
    refused: Callable[[Execution, InputError], None]
    spent: float = 0.0
    pace: float | None = None
    seconds: dict[Execution, float] = field(default_factory=dict)

    def run(self, candidates: Sequence[Execution]) -> None:
        """Fills ``seconds`` with what the clients take by each execution that was worth timing."""
        lost: set[str] = set()
        for how in candidates:
            if not self._is_affordable(self.best):
                return
            if how.name in lost:
                continue
            predicted = self._predicted(how)
            if predicted == math.inf or predicted > LOST * self.best:
                lost.add(how.name)
            if predicted < math.inf and predicted <= HOPELESS * self.best and self._is_affordable(predicted):
                self._time_all(how)
                self._time_again(how)  # the first time may have been spent on getting memory
        for how in list(self.seconds) if len(self.seconds) > 1 else []:
            self._time_again(how)

    @property
    def best(self) -> float:
        """What the clients take by the fastest."""
        return min(self.seconds.values(), default=math.inf)

    @property
    def fastest(self) -> Execution | None:
        """The fastest execution; None where there was no time to find out."""
        return min(self.seconds, key=lambda how: self.seconds[how], default=None)

    def told(self) -> str:
        """What was measured, in words."""
        timings = (f"{1000 * took / self.clients:.2f} ms by {how}" for how, took in self.seconds.items())
        return f"a client takes {', '.join(timings)}" if self.seconds else ""

    def working(self, candidates: Sequence[Execution]) -> Execution:
        """The most promising one that works, where nothing was timed. Clients can always run one by one."""
        affordable = SHARE * self.work >= FEW
        return next(how for how in candidates if not how.chunk or (affordable and self._works(how)))

    def _is_affordable(self, seconds: float) -> bool:
        if self.pace is None:
            return self.clients + 2 * FEW + SOME <= SHARE * self.work
        return self.spent + seconds <= SHARE * self.work * self.pace

    def _predicted(self, how: Execution) -> float:
        """What all clients will take, after a few of them; the first attempt warms up. Infinite: this does not work."""
        if not self._works(how):
            return math.inf
        few = self._time(how, FEW)
        if not how.chunk:
            return few * self.clients / FEW
        if self.clients <= SOME:
            return few
        some = self._time(how, SOME)
        return some + max(some - few, 0.0) * (self.clients - SOME) / (SOME - FEW)

    def _works(self, how: Execution) -> bool:
        try:
            self._time(how, FEW)
        except InputError as error:
            self.refused(how, error)
            return False
        return True

    def _time_again(self, how: Execution) -> None:
        if self.seconds[how] <= CLOSE * self.best and self._is_affordable(self.seconds[how]):
            self._time_all(how)

    def _time_all(self, how: Execution) -> None:
        self.seconds[how] = min(self.seconds.get(how, math.inf), self._time(how, self.clients))
        self.pace = self.best / self.clients

    def _time(self, how: Execution, clients: int) -> float:
        began = time.perf_counter()
        try:
            self.attempt(how, clients)
        finally:
            took = time.perf_counter() - began
            self.spent += took
        return took


@dataclass
class Watch:
    """Compares what clients take, round after round, with what was ``expected`` when their execution was chosen.

    The best of ``WINDOW`` cohorts is looked at, so that a single slow one tells nothing. ``spent`` is the time that all
    choices took so far.
    """

    expected: float | None = None
    spent: float = 0.0
    surprised: bool = False
    recent: list[float] = field(default_factory=list)

    def begin(self, race: Race) -> None:
        """Goes on from the result of a race."""
        self.expected, self.spent, self.surprised, self.recent = race.pace, race.spent, False, []

    def saw(self, seconds: float) -> None:
        """Hears what a client of a cohort took. Where nothing was measured, the first cohorts tell what to expect."""
        self.recent.append(seconds)
        if len(self.recent) < WINDOW:
            return
        took, self.recent = min(self.recent), []
        self.expected = self.expected or took
        self.surprised = not self.expected / SURPRISE <= took <= self.expected * SURPRISE
