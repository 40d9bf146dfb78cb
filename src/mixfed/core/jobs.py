"""Jobs in flight: a virtual clock, and who reports when.

A job is a client that was asked in a round and has not been heard of yet. Jobs arrive in the order of their time, those
of the same time in the order in which they were asked. The table has a row for each busy client and is a tree, so that
a resumed run finds the same jobs in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mixfed.core.schedule import Schedule, sample_cohort

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Arrivals:
    """Jobs of one source in the order of their arrival: the clients, the round that asked them, and the version of
    the model that they started from."""

    source: str
    clients: Numbers
    rounds: Numbers
    versions: Numbers

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, chosen: slice | NDArray[np.bool_]) -> Arrivals:
        return Arrivals(self.source, self.clients[chosen], self.rounds[chosen], self.versions[chosen])

    def by_round(self) -> list[tuple[int, Arrivals]]:
        """Those that were asked in the same round together, the oldest round first."""
        return [(int(r), self[self.rounds == r]) for r in np.unique(self.rounds)]

    @staticmethod
    def joined(parts: list[Arrivals]) -> Arrivals:
        """One after the other."""
        columns = (np.concatenate([getattr(p, name) for p in parts]) for name in ("clients", "rounds", "versions"))
        return Arrivals(parts[0].source, *columns)


class InFlight:
    """The jobs of one source. The clock starts at 0, and its unit is a round."""

    def __init__(self, schedule: Schedule, seed: int, source: str, population: int) -> None:
        self.schedule, self.seed, self.source, self.population = schedule, seed, source, population
        self.now = 0.0
        self._asked = 0
        self._round = -1
        self._attempts = 0
        self._this_round: set[int] = set()
        self.bad = 0
        """How many updates in a row, up to the last, had a number that is not finite."""
        self._jobs = {name: np.zeros(0, np.int64) for name in ("client", "round", "version", "number")}
        self._times = {name: np.zeros(0) for name in ("arrives", "free")}

    def __len__(self) -> int:
        return len(self._jobs["client"])

    def choose(self, round: int, size: int) -> Numbers:
        """Clients to ask: none that is busy, and none that was asked or reported in this round before."""
        if self._round != round:
            self._round, self._attempts, self._this_round = round, 0, set()
        if size < 1:
            return np.zeros(0, np.int64)
        if self.schedule.joining:
            return self.schedule.joining.cohort(self.seed, round, self.source, self.population, size)
        busy = self._this_round | set(self._jobs["client"].tolist())
        self._attempts += 1
        return sample_cohort(self.seed, round, self.source, self.population, size, busy, self._attempts - 1)

    def send(self, clients: Numbers, round: int, version: int) -> None:
        """The clients start now; their delays decide when they report, and the schedule for how long it waits."""
        delays = self.schedule.delays(self.seed, round, self.source, clients)
        patience = self.schedule.patience or np.inf
        number = np.arange(self._asked, self._asked + len(clients))
        news = {"client": clients, "round": np.full_like(clients, round), "version": np.full_like(clients, version)}
        times = {
            "arrives": self.now + np.where(delays <= patience, delays, np.inf),
            "free": self.now + np.minimum(delays, patience),
        }
        self._jobs = {n: np.concatenate([x, (news | {"number": number})[n]]) for n, x in self._jobs.items()}
        self._times = {n: np.concatenate([x, times[n]]) for n, x in self._times.items()}
        self._asked += len(clients)
        self._this_round |= set(clients.tolist())

    def advance(self, time: float) -> Arrivals:
        """Lets the clock run to this time and gives up the clients that are waited for no longer, which it returns."""
        self.now = max(self.now, time)
        lost = np.isinf(self._times["arrives"]) & (self._times["free"] <= self.now)
        return self._take(np.flatnonzero(lost))

    def next_event(self) -> float:
        """When the next client reports or is given up; infinite where none ever will."""
        return float(self._times["free"].min()) if len(self) else np.inf

    def late(self, round: int, since: float, before: float) -> Arrivals:
        """Takes what was asked in an earlier round and arrives between the two times.

        What had come by the time ``since``, when this round began, was not late: it waits for a buffer to fill.
        """
        return self._take(self._arrived(before, (self._jobs["round"] < round) & (self._times["arrives"] >= since)))

    @property
    def exhausted(self) -> bool:
        """Whether every client is busy or has been asked in this round, so that no other can be."""
        return len(self._this_round | set(self._jobs["client"].tolist())) >= self.population

    def stuck(self, time: float) -> bool:
        """Whether nothing changes from this time on: all clients are busy, and nobody reports or is given up."""
        free, lost = self._times["free"], np.isinf(self._times["arrives"])
        return len(self) >= self.population and not (np.isfinite(free) & ((free >= time) | lost)).any()

    def arrived(self, before: float, limit: int | None = None, multiple: int = 1) -> Arrivals:
        """Takes what arrives before this time, the first first: at most ``limit`` jobs, a multiple of ``multiple``."""
        rows = self._arrived(before, True)[:limit]
        return self._take(rows[: len(rows) // multiple * multiple])

    def tree(self) -> dict[str, Any]:
        """The jobs as a tree."""
        tables = {n: torch.from_numpy(x) for n, x in (self._jobs | self._times).items()}
        return {"now": self.now, "asked": self._asked, "bad": self.bad, "jobs": tables}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes up the jobs of a checkpoint."""
        self.now, self._asked, self.bad = float(saved["now"]), int(saved["asked"]), int(saved["bad"])
        table = {n: x.cpu().numpy() for n, x in saved["jobs"].items()}
        self._jobs = {n: table[n] for n in self._jobs}
        self._times = {n: table[n] for n in self._times}

    def _arrived(self, before: float, which: NDArray[np.bool_] | bool) -> Numbers:
        rows = np.flatnonzero((self._times["arrives"] < before) & which)
        return rows[np.lexsort((self._jobs["number"][rows], self._times["arrives"][rows]))]

    def _take(self, rows: Numbers) -> Arrivals:
        taken = Arrivals(self.source, *(self._jobs[n][rows] for n in ("client", "round", "version")))
        self._this_round |= set(taken.clients.tolist())
        self._jobs = {n: np.delete(x, rows) for n, x in self._jobs.items()}
        self._times = {n: np.delete(x, rows) for n, x in self._times.items()}
        return taken
