"""Which of several executions is the fastest, found out in a small share of a run's time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mixfed.backends.simulator.execution import Execution
from mixfed.errors import InputError

FIRST, AGAIN = 0.03, 0.02
"""How much of the time that a run is expected to take may be spent on the first choice, and on all later ones."""

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
"""Steps that take so many times longer, or shorter, than measured are a surprise: the machine was or is busy."""


@dataclass(frozen=True)
class Trial:
    """The ``steps`` of the clients on whom executions are timed.

    ``at_once`` says how many clients an execution runs as one chunk, whose steps are those of the longest.
    """

    steps: NDArray[np.int64]
    at_once: Callable[[Execution], int]

    def __len__(self) -> int:
        return len(self.steps)

    def length(self, how: Execution, clients: int) -> int:
        """The steps that are taken one after another with so many clients."""
        size, steps = self.at_once(how), self.steps[:clients]
        return int(sum(steps[i : i + size].max() for i in range(0, len(steps), size)))


@dataclass
class Race:
    """Times executions of the same clients, the most promising first.

    ``attempt(how, n)`` runs the first n of them and throws the results away, and ``promised(how)`` are the seconds that
    all of them are likely to take. ``work`` is how many steps of clients the run takes in all its rounds. Nothing is
    attempted that would, as far as is known, bring what was ``spent`` above the ``share`` of the time that all this
    work takes at the best ``pace`` so far, in seconds a step. ``refused`` hears of executions that fail. ``seconds``
    are those that all the clients take.
    """

    attempt: Callable[[Execution, int], None]
    trial: Trial
    work: float
    refused: Callable[[Execution, InputError], None]
    promised: Callable[[Execution], float]
    share: float = field(default_factory=lambda: FIRST)
    spent: float = 0.0
    pace: float | None = None
    seconds: dict[Execution, float] = field(default_factory=dict)

    def run(self, candidates: Sequence[Execution]) -> None:
        """Fills ``seconds`` with what the clients take by each execution that was worth timing.

        The first that works is timed on all clients, whatever a few of them tell: by them alone, the best may look
        hopeless.
        """
        lost: set[str] = set()
        for how in candidates if self._is_long_enough else []:
            if how.name in lost or not self._is_affordable(self._of_a_look(how)):
                continue
            predicted = self._predicted(how)
            if predicted > LOST * self.best:
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
        timings = (f"{1000 * took / len(self.trial):.2f} ms by {how}" for how, took in self.seconds.items())
        return f"a client takes {', '.join(timings)}" if self.seconds else ""

    def working(self, candidates: Iterable[Execution]) -> Execution:
        """The most promising one that works, where nothing was timed. Clients can always run one by one."""
        affordable = (FIRST + AGAIN) * self.work >= FEW * float(self.trial.steps.mean())
        return next(how for how in candidates if not how.chunk or (affordable and self._works(how)))

    @property
    def _is_long_enough(self) -> bool:
        """Whether the run is long enough for the first execution, of which all clients are timed twice after a few."""
        return 3 * int(self.trial.steps.sum()) <= self.share * self.work

    def _of_a_look(self, how: Execution) -> float:
        """What it takes to see a few clients twice: under vmap, at worst, as much as all of them."""
        if self.fastest is None:
            return 0.0
        share = 1.0 if how.chunk else min(FEW / len(self.trial), 1.0)
        return 2 * share * self.best * self.promised(how) / self.promised(self.fastest)

    def _is_affordable(self, seconds: float) -> bool:
        return self.pace is None or self.spent + seconds <= self.share * self.work * self.pace

    def _predicted(self, how: Execution) -> float:
        """What all clients will take, after a few; the first attempt warms up. Infinite: it does not work."""
        if not self._works(how):
            return math.inf
        if not self.seconds:
            return 0.0
        few, length = self._time_a_step(how, FEW), self.trial.length(how, len(self.trial))
        size = min(self.trial.at_once(how), len(self.trial))
        slower = few * length > HOPELESS * self.best  # more clients at once take no less
        if not how.chunk or size <= SOME or slower or not self._is_affordable(few * length * SOME / FEW):
            return few * length
        some = self._time_a_step(how, SOME)
        return (some + max(some - few, 0.0) * (size - SOME) / (SOME - FEW)) * length

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
        took = self._time(how, len(self.trial))
        if self.pace is None:  # what a few clients took beyond that went into loading, which a first round does as well
            self.spent = min(self.spent, 2 * took)
        self.seconds[how] = min(self.seconds.get(how, math.inf), took)
        self.pace = self.best / float(self.trial.steps.sum())

    def _time_a_step(self, how: Execution, clients: int) -> float:
        """What a step takes of so many clients."""
        return self._time(how, clients) / self.trial.length(how, clients)

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
    """Compares what a client's step takes, round after round, with what was ``expected`` when it was chosen.

    The best of ``WINDOW`` cohorts is looked at, so that a single slow one tells nothing. After a surprise it is what is
    expected from then on. ``spent`` is what choosing again took so far.
    """

    expected: float | None = None
    spent: float = 0.0
    surprised: bool = False
    recent: list[float] = field(default_factory=list)

    def begin(self, race: Race) -> None:
        """Goes on from the result of a race that was run again."""
        self.expected, self.spent, self.surprised, self.recent = race.pace, race.spent, False, []

    def saw(self, seconds: float) -> None:
        """Hears what a client's step took in a cohort. Where nothing was measured, the first cohorts tell."""
        self.recent.append(seconds)
        if len(self.recent) < WINDOW:
            return
        took, self.recent = min(self.recent), []
        self.expected = self.expected or took
        if not self.expected / SURPRISE <= took <= self.expected * SURPRISE:
            self.expected, self.surprised = took, True
