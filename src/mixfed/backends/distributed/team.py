"""Ranks as a team of the simulator: each trains a share of a cohort, and all know what came of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from mixfed.backends.distributed.merge import merged
from mixfed.backends.distributed.privates import RankPrivates
from mixfed.backends.distributed.ranks import Ranks
from mixfed.backends.distributed.shares import Deal, Numbers, home_of, in_stretches, longest_first, steps_of
from mixfed.backends.simulator.choice import Chooser
from mixfed.backends.simulator.ordered import Ladder
from mixfed.backends.simulator.team import Found
from mixfed.backends.work import keeps_parts
from mixfed.core.algorithm import Message, Private
from mixfed.core.backend import Run
from mixfed.core.batches import Plan
from mixfed.core.jobs import Jobs
from mixfed.data.parts import PartOfClients, cuts_of
from mixfed.errors import InputError


class RankTeam:
    """All ranks of a run. Clients that keep something belong to a rank; others are dealt out anew in every round."""

    def __init__(self, ranks: Ranks, deal: Deal = longest_first) -> None:
        self.ranks, self.deal = ranks, deal

    def start(self, run: Run) -> None:
        """Finds out where clients belong."""
        self.run = run
        rank, size = self.ranks.rank, self.ranks.size
        self.cuts = {source: cuts_of(data.offsets, size) for source, data in run.data.items()}
        self.at_home = keeps_parts(run.algorithm)
        for source, data in run.data.items():
            if isinstance(data, PartOfClients):
                self.at_home = True
                if [data.first, data.end] != self.cuts[source][rank : rank + 2].tolist():
                    raise InputError(f"Rank {rank} of {size} needs part {rank} of {size} of '{source}'; see open_part.")

    def privates(self, initial: Callable[[], Private], folder: str | Path | None) -> RankPrivates:
        """The private parts of this rank's own clients."""
        self._privates = RankPrivates(initial, folder, self.ranks, self.cuts)
        return self._privates

    def choose(self, jobs: Jobs, chooser: Chooser, plan: Callable[[Jobs], tuple[Message, Plan]]) -> None:
        """The rank with the most clients times the ways to run them, and all ranks do as it says."""
        if not chooser.is_open(jobs.source, len(jobs)):
            return
        owner = self._owners(jobs)
        counts = np.bincount(owner, minlength=self.ranks.size)
        first = int(counts.argmax())
        if counts[first] < 2:
            return
        text = chooser.choose(*plan(jobs[owner == first])) if self.ranks.rank == first else ""
        chooser.adopt(jobs.source, self.ranks.of(first, text))

    def gathered(self, jobs: Jobs, work: Callable[[Jobs], Found]) -> Found:
        """Simulates this rank's share, and adds up what all ranks have."""
        own = self._own(jobs)
        mine = work(own) if len(own) else {}
        found = merged(self.ranks, mine, self.run.algorithm.model.device)
        self._note(jobs, found)
        return found

    def stretch(self, source: str, clients: Numbers, unit: int) -> slice:
        """This rank's own clients, or a stretch of about as many steps as those of other ranks."""
        owner = (
            home_of(clients, self.cuts[source])
            if self.at_home
            else in_stretches(self._steps(source, clients), self.ranks.size, unit)
        )
        return slice(*np.searchsorted(owner, [self.ranks.rank, self.ranks.rank + 1]).tolist())

    def in_order(self, jobs: Jobs, found: Mapping[int, Ladder]) -> Found:
        """Makes the nodes that no rank could make alone."""
        ladders = {round: Ladder() for round in np.unique(jobs.rounds).tolist()}
        for of_rank in self.ranks.gather({round: ladder.nodes for round, ladder in found.items()}):
            for round, nodes in of_rank.items():
                for node in nodes:
                    ladders[round].add(*node)
        whole = {round: ladder.total() for round, ladder in ladders.items()}
        self._note(jobs, whole)
        return whole

    def counted(self, jobs: Jobs, count: Callable[[Jobs], Mapping[str, int]]) -> dict[str, int]:
        """Counts for this rank's share, and adds up."""
        own = self._own(jobs)
        mine = dict(count(own)) if len(own) else {}
        found = self.ranks.gather(mine)
        return {name: sum(counts.get(name, 0) for counts in found) for counts in found for name in counts}

    def _note(self, jobs: Jobs, found: Found) -> None:
        """Remembers which clients of other ranks have kept something."""
        for round, one in found.items():
            if one.kept and not self.at_home:
                name = self.run.algorithm.name
                raise InputError(f"Clients of {name} keep something, and OwnParts.first of the algorithm has nothing.")
            asked = jobs.clients[jobs.rounds == round]
            self._privates.note(jobs.source, asked[~np.isin(asked, one.dropped)], one.kept)

    def _own(self, jobs: Jobs) -> Jobs:
        return jobs[self._owners(jobs) == self.ranks.rank]

    def _owners(self, jobs: Jobs) -> Numbers:
        """The rank that simulates each of these jobs."""
        if self.at_home:
            return home_of(jobs.clients, self.cuts[jobs.source])
        return self.deal(self._steps(jobs.source, jobs.clients), self.ranks.size)

    def _steps(self, source: str, clients: Numbers) -> Numbers:
        return steps_of(self.run.data[source].sizes(clients), self.run.algorithm.batching[source])
