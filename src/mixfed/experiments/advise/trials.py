"""Short trials of methods under a budget of time: those that do badly are left early (successive halving)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
SLOW = 1.5
"""A method that takes so many times its share of the time is not tried to the end."""


@dataclass
class Trial:
    """A method with settings: how far it was tried, its figure there, and what it cost."""

    recipe: Recipe
    settings: dict[str, Any]
    rounds: int = 0
    scores: dict[int, float] = field(default_factory=dict)
    """The figure after each of some rounds."""
    others: list[float] = field(default_factory=list)
    """The last figures with other seeds."""
    seconds: float = 0.0
    sent: int = 0
    why_not: str = ""

    @property
    def algorithm(self) -> str:
        """The name of the method."""
        return self.recipe.algorithm

    def score(self, metric: str, at: int | None = None) -> float:
        """The mean figure over seeds so far, as it was after round ``at``; the worst there is where it failed."""
        worst = float("inf") if small_is_good(metric) else -float("inf")
        known = [score for round, score in self.scores.items() if at is None or round <= at]
        if self.why_not or not known:
            return worst
        return sum([known[-1], *self.others]) / (1 + len(self.others)) if at is None else known[-1]


class Field:
    """Trials of one recipe's data, until a moment on the clock.

    ``deal`` keeps validation examples apart, others for another seed, so that a method is not judged by a few. A trial
    is the beginning of a whole run: it stops after some rounds with a checkpoint, and goes on from there if it does
    well.
    """

    def __init__(
        self,
        deal: Callable[[int], Scenario],
        metric: str,
        until: float,
        folder: Path,
        told: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deal, self._dealt, self._clock = deal, dict[int, Scenario](), clock
        self.metric, self.until, self.folder, self.told = metric, until, folder, told

    def left(self) -> float:
        """The seconds that are left."""
        return self.until - self._clock()

    def ranked(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials that did not fail, best first; of equals, the one that sends less."""
        sign = 1 if small_is_good(self.metric) else -1
        alive = [trial for trial in trials if not trial.why_not and trial.scores]
        at = min((trial.rounds for trial in alive), default=0)
        equal = all(trial.rounds == at for trial in alive)
        return sorted(alive, key=lambda t: (sign * t.score(self.metric, None if equal else at), t.sent))

    def go_on(self, trial: Trial, to: int, seconds: float) -> None:
        """Trains the trial up to a round, for so many seconds at most (and to its next evaluation at least)."""
        if trial.why_not or trial.rounds >= to:
            return
        began = self._clock()

        def note(record: Record) -> None:
            trial.rounds = record.round
            trial.sent = record.ledger["bytes_down"] + record.ledger["bytes_up"]
            if self.metric in record.metrics and is_number(record.metrics[self.metric]):
                trial.scores[record.round] = record.metrics[self.metric]

        def enough(every: int) -> bool:
            """Asked after the record of a round: yes at an evaluation, and at once if it takes too long."""
            took = self._clock() - began
            wanted = trial.rounds >= to or took > seconds
            too_long = took > SLOW * seconds and (bool(trial.scores) or self.left() < 0)
            return (wanted and trial.rounds % every == 0) or too_long

        every, place = trial.recipe.evaluate.every, self.folder / f"{trial.algorithm}-{id(trial)}"
        try:
            with _quietly():
                build(trial.recipe, self._scenario(trial.recipe.seed)).run(
                    callbacks=[note],
                    checkpoints=Checkpoints(place, every=trial.recipe.rounds, say=lambda sentence: None),
                    resume=place.exists(),
                    should_stop=lambda: enough(every),
                )
        except RunStopped as error:
            trial.why_not = f"it diverged: {error}"
        except InputError as error:
            trial.why_not = str(error)
        trial.seconds += self._clock() - began
        if not trial.why_not and trial.rounds < to and not trial.scores:
            trial.why_not = f"too slow to try: {trial.rounds} rounds took {trial.seconds:.0f} s"

    def again(self, trial: Trial, seed: int) -> None:
        """The same trial with another seed: of training, and of what is kept apart to judge by."""
        more = Trial(replace(trial.recipe, seed=seed), trial.settings)
        self.go_on(more, trial.rounds, SLOW * max(trial.seconds, 1.0))
        if more.scores and not more.why_not and more.rounds == trial.rounds:
            trial.others.append(more.score(self.metric))

    def _scenario(self, seed: int) -> Scenario:
        if seed not in self._dealt:
            self._dealt[seed] = self._deal(seed)
        return self._dealt[seed]

    def halve(
        self, trials: Sequence[Trial], first: int, rounds: int, keep: int, slow_starters: Container[str]
    ) -> list[Trial]:
        """Tries all for ``first`` rounds, the better half for twice as many, and so on; the last ``keep`` of them.

        Methods that are ``slow_starters`` are not left early: models of clients' own are judged when all have trained.
        """
        alive, to = list(trials), first
        while True:
            for number, trial in enumerate(alive):
                share = max(self.left() * 0.6 / (len(alive) - number), 0.5)
                self.told(f"{trial.algorithm}: {to} of {rounds} rounds ({number + 1} of {len(alive)})")
                self.go_on(trial, to, share)
            alive = self.ranked(alive)
            if to >= rounds or self.left() < 0 or not alive:
                return alive[:keep]
            half = max(keep, -(-len(alive) // 2))
            alive = alive[:half] + [trial for trial in alive[half:] if trial.algorithm in slow_starters]
            to = min(2 * to, rounds)


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


def first_rounds(per_round: float, methods: int, rounds: int, seconds: float) -> int:
    """How many rounds every method may be tried for at first: each further doubling costs half as much again."""
    affordable = int(0.5 * seconds / (3 * max(methods, 1) * max(per_round, 1e-6)))
    every = max(rounds // STEPS, 1)
    return min(max(affordable // every * every, every), rounds)
