"""Trials of methods under a budget of time: all to the end if they can, and else the worst are left on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mixfed.core.checkpoint import Checkpoints
from mixfed.core.loop import Record
from mixfed.data.scenario import Scenario
from mixfed.errors import InputError, RunStopped
from mixfed.experiments.build import build
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.scores import is_number, small_is_good

STEPS = 8
"""A run is looked at after so many equal parts of its rounds."""
LAST = 0.25
"""A trial's figure is its mean over this last share of its rounds: single rounds may be ten points apart."""
TRYING = 0.6
"""The share of the time in which every method is tried once; the rest is for other rates and seeds."""
PATIENCE = 3
"""A method that takes so many times its share of the time is too slow."""


@dataclass(eq=False)
class Trial:
    """A method with settings: how far it was tried, its figure there, and what it cost."""

    recipe: Recipe
    settings: dict[str, Any]
    rounds: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    """The figure after each of some rounds."""
    loss: float = float("inf")
    """The last loss, by which trials with the same figure differ: at first many methods answer one class only."""
    others: list[float] = field(default_factory=list)
    """The figures with other seeds."""
    seconds: float = 0.0
    pace: float = 0.0
    """The seconds of a round, lately: where clients are late, the first rounds have little to do."""
    sent: int = 0
    why_not: str = ""

    @property
    def algorithm(self) -> str:
        """The name of the method."""
        return self.recipe.algorithm

    @property
    def ended(self) -> bool:
        """Whether it was tried for all rounds."""
        return self.rounds >= self.recipe.rounds

    def score(self, metric: str, at: int | None = None) -> float:
        """The mean figure over seeds so far, as it was after round ``at``; the worst there is where it failed."""
        until = self.rounds if at is None else at
        known = [score for round, score in self.scores.items() if round <= until]
        if self.why_not or not known:
            return float("inf") if small_is_good(metric) else -float("inf")
        late = [score for round, score in self.scores.items() if (1 - LAST) * until < round <= until] or known[-1:]
        mean = sum(late) / len(late)
        return mean if at is not None else (mean + sum(self.others)) / (1 + len(self.others))

    def cost(self, to: int) -> float:
        """The seconds that it would take from where it is to a round."""
        return self.pace * max(to - self.rounds, 0)


class Field:
    """Trials of one recipe's data, until a moment on the clock.

    ``deal`` keeps validation examples apart, others for another seed, so that a method is not judged by a few. A trial
    is the beginning of a whole run: it stops after some rounds with a checkpoint, and goes on from there if it does
    well. Methods ``in_phases`` do something else in the end than in the beginning, so only whole runs of theirs count.
    """

    def __init__(
        self,
        deal: Callable[[int], Scenario],
        metric: str,
        until: float,
        folder: Path,
        told: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        in_phases: Container[str] = (),
    ) -> None:
        self._deal, self._clock, self._in_phases = lru_cache(maxsize=2)(deal), clock, in_phases
        self.metric, self.until, self.folder, self.told = metric, until, folder, told
        self._places: dict[Trial, Path] = {}

    def left(self) -> float:
        """The seconds that are left."""
        return self.until - self._clock()

    def judged(self, trial: Trial) -> bool:
        """Whether the trial has a figure that tells something."""
        return not trial.why_not and bool(trial.scores) and (trial.ended or trial.algorithm not in self._in_phases)

    def ranked(self, trials: Sequence[Trial], at: int | None = None) -> list[Trial]:
        """The trials that can be judged, best first, as they were after round ``at``.

        Of equals, the one with the smaller loss is the better one, and then the one that sends less.
        """
        sign = 1 if small_is_good(self.metric) else -1
        return sorted(filter(self.judged, trials), key=lambda t: (sign * t.score(self.metric, at), t.loss, t.sent))

    def go_on(self, trial: Trial, to: int, seconds: float) -> None:
        """Trains the trial up to a round, for so many seconds at most."""
        if trial.why_not or trial.rounds >= to:
            return
        began, before = self._clock(), trial.rounds

        def note(record: Record) -> None:
            trial.rounds = record.round
            trial.sent = record.ledger["bytes_down"] + record.ledger["bytes_up"]
            if self.metric in record.metrics and is_number(record.metrics[self.metric]):
                trial.scores[record.round] = record.metrics[self.metric]
                trial.loss = next((x for name, x in record.metrics.items() if name.startswith("loss")), trial.loss)

        place = self._places.setdefault(trial, self.folder / str(len(self._places)))
        try:
            with _quietly():
                build(trial.recipe, self._deal(trial.recipe.seed)).run(
                    callbacks=[note],
                    checkpoints=Checkpoints(place, every=trial.recipe.rounds, say=lambda sentence: None),
                    resume=place.exists(),
                    should_stop=lambda: trial.rounds >= to or self._clock() - began > seconds,
                )
        except RunStopped as error:
            trial.why_not = f"it diverged: {str(error).rstrip('.')}"
        except InputError as error:
            trial.why_not = str(error).rstrip(".")
        took = self._clock() - began
        trial.seconds, trial.pace = trial.seconds + took, took / max(trial.rounds - before, 1)
        if not trial.why_not and not trial.scores:
            trial.why_not = f"too slow to try: {rounds_told(trial.rounds)} took {trial.seconds:.0f} s"

    def again(self, trial: Trial, seed: int) -> None:
        """The same trial with another seed: of training, and of what is kept apart to judge by."""
        more = Trial(replace(trial.recipe, seed=seed), trial.settings)
        self.go_on(more, trial.rounds, max(self.left(), 0))
        if more.why_not and self.left() > 0:
            trial.why_not = f"with another seed: {more.why_not}"
        elif more.rounds == trial.rounds and not more.why_not:
            trial.others.append(more.score(self.metric))

    def compete(self, trials: Sequence[Trial], first: int, rounds: int, slow_starters: Container[str]) -> list[Trial]:
        """The trials that came to the end, or as far as the time allowed, best first.

        Where there is time in the end, what was left on the way goes on after all: plans are cautious and pace changes.
        """
        best = self._narrow(trials, first, rounds, slow_starters)
        if not any(trial.ended for trial in best):
            return best
        left = [trial for trial in trials if not trial.why_not and not trial.ended]
        for trial in [*self.ranked(left), *(trial for trial in left if not self.judged(trial))]:
            if trial.cost(rounds) <= TRYING * self.left():
                self.told(f"{trial.algorithm}: to the end after all")
                self.go_on(trial, rounds, TRYING * self.left())
        return self.ranked([trial for trial in trials if trial.ended], rounds)

    def _narrow(self, trials: Sequence[Trial], first: int, rounds: int, slow_starters: Container[str]) -> list[Trial]:
        """Tries all for ``first`` rounds, then for twice as many and so on to the end; the last of them, best first.

        Where not all can end in time, those go on that can be afforded: the best two, then those that are judged late,
        then the others, best first. ``slow_starters`` are judged late: models of clients' own tell little before all
        clients have trained.
        """
        alive, best, to = list(trials), list[Trial](), first
        while True:
            self._stage(alive, to, TRYING * self.left() / (1 if to >= rounds else 2))
            alive = [trial for trial in alive if trial.rounds >= to and not trial.why_not]
            best = self.ranked(alive, to) or best
            if not alive or to >= rounds or self.left() < 0:
                return best
            late = [trial for trial in alive if trial not in best or trial.algorithm in slow_starters]
            alive = [*best[:2], *(t for t in late if t not in best[:2]), *(t for t in best[2:] if t not in late)]
            to = 2 * to if 3 * to < rounds else rounds
            if sum(trial.cost(rounds) for trial in alive) > TRYING * self.left():
                alive = _affordable(alive, to, TRYING * self.left() / stages(to, rounds))

    def _stage(self, alive: Sequence[Trial], to: int, seconds: float) -> None:
        """All of them go on to a round; what one does not need of its share is left to those after it.

        Half a share is for everyone, also where those before it took too long, and the best two may take very long.
        """
        stop = self._clock() + seconds
        for number, trial in enumerate(alive):
            left, later = stop - self._clock(), alive[number + 1 :]
            spare = left - sum(other.cost(to) for other in later) if trial.rounds else 0
            limit = max(min(max(PATIENCE * left / (1 + len(later)), spare), left), seconds / len(alive) / 2)
            if trial.rounds and number < 2:
                limit = TRYING * self.left() / 2
            self.told(f"{trial.algorithm}: {to} of {trial.recipe.rounds} rounds ({number + 1} of {len(alive)})")
            self.go_on(trial, to, min(limit, max(self.left(), 0)))


def _affordable(trials: Sequence[Trial], to: int, seconds: float) -> list[Trial]:
    """The trials that can go on to a round in so many seconds, the first two in any case."""
    kept: list[Trial] = []
    for trial in trials:
        if len(kept) < 2 or seconds >= trial.cost(to):
            seconds -= trial.cost(to)
            kept.append(trial)
    return kept


def rounds_told(number: int) -> str:
    """So many rounds, in words."""
    return "1 round" if number == 1 else f"{number} rounds"


def stages(to: int, rounds: int) -> int:
    """In how many stages a run of so many rounds ends if the next one ends at ``to``; each doubles, or ends the run."""
    return 1 if to >= rounds else 1 + stages(2 * to if 3 * to < rounds else rounds, rounds)


@contextmanager
def _quietly() -> Iterator[None]:
    """While active, the library warns of nothing: a method that does badly in a trial is no surprise."""
    log = logging.getLogger("mixfed")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def affordable_rounds(per_round: float, methods: int, seconds: float) -> int:
    """So many rounds of every method take a quarter of the time; one at least."""
    return max(int(seconds / (4 * max(methods, 1) * max(per_round, 1e-6))), 1)
