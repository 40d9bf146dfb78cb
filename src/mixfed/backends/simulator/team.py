"""Who simulates the clients of a run: this process alone, or several together (:mod:`mixfed.backends.distributed`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from mixfed.backends.simulator.choice import Chooser
from mixfed.backends.simulator.gathered import Gathered
from mixfed.backends.simulator.ordered import Ladder
from mixfed.core.algorithm import Message, Private
from mixfed.core.backend import Run
from mixfed.core.batches import Plan
from mixfed.core.jobs import Jobs, Numbers
from mixfed.core.private import PrivateStore

Found = dict[int, Gathered]
"""What clients did, by the round whose message they were sent."""


class Team(Protocol):
    """The processes that simulate one run. Each method is called by all of them, with the same jobs."""

    def start(self, run: Run) -> None:
        """Takes up a run."""

    def privates(self, initial: Callable[[], Private], folder: str | Path | None) -> PrivateStore:
        """The private parts of the clients that are simulated here, which knows of all others."""

    def choose(self, jobs: Jobs, chooser: Chooser, plan: Callable[[Jobs], tuple[Message, Plan]]) -> None:
        """Sees to it that all members run the clients of a source in the same way."""

    def gathered(self, jobs: Jobs, work: Callable[[Jobs], Found]) -> Found:
        """What the clients of these jobs did; ``work`` simulates those that fall to this process."""

    def stretch(self, source: str, clients: Numbers, unit: int) -> slice:
        """The part of a cohort that falls to this process; it begins and ends at a multiple of ``unit`` clients."""

    def in_order(self, jobs: Jobs, found: Mapping[int, Ladder]) -> Found:
        """What the clients of these jobs did, from what the stretches of all members did."""

    def counted(self, jobs: Jobs, count: Callable[[Jobs], Mapping[str, int]]) -> dict[str, int]:
        """Numbers of all these jobs; ``count`` finds those of the jobs that fall to this process."""


class Alone:
    """One process has all clients."""

    def start(self, run: Run) -> None:
        """Nobody has to be told."""

    def privates(self, initial: Callable[[], Private], folder: str | Path | None) -> PrivateStore:
        """All clients keep what is theirs here."""
        return PrivateStore(initial, folder)

    def choose(self, jobs: Jobs, chooser: Chooser, plan: Callable[[Jobs], tuple[Message, Plan]]) -> None:
        """A cohort's execution is chosen when the cohort is run."""

    def gathered(self, jobs: Jobs, work: Callable[[Jobs], Found]) -> Found:
        """All work is done here."""
        return work(jobs)

    def stretch(self, source: str, clients: Numbers, unit: int) -> slice:
        """All of it."""
        return slice(0, len(clients))

    def in_order(self, jobs: Jobs, found: Mapping[int, Ladder]) -> Found:
        """There is one stretch."""
        return {round: ladder.total() for round, ladder in found.items()}

    def counted(self, jobs: Jobs, count: Callable[[Jobs], Mapping[str, int]]) -> dict[str, int]:
        """All is counted here."""
        return dict(count(jobs))
