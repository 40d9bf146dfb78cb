"""Jobs in flight: one book that the policy and the backend share.

A job is a client that was asked in a round and whose update has not been taken yet. The policy writes down whom it
asked and what it took; the backend tells who has reported, and when. The book is a tree, so that a resumed run finds
the same jobs in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Times = NDArray[np.float64]

_WHOLE = ("client", "round", "version", "number")
_TIMES = ("asked", "reported")


@dataclass(frozen=True)
class Jobs:
    """Jobs of one source: the clients, the round that asked each, the version of the model that each started from,
    the number of the job (jobs are numbered in the order in which they are asked), and when it was asked."""

    source: str
    clients: Numbers
    rounds: Numbers
    versions: Numbers
    numbers: Numbers
    asked: Times

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, chosen: slice | NDArray[np.bool_] | Numbers) -> Jobs:
        columns = (getattr(self, name)[chosen] for name in ("clients", "rounds", "versions", "numbers", "asked"))
        return Jobs(self.source, *columns)

    def by_round(self) -> list[tuple[int, Jobs]]:
        """Those that were asked in the same round together, the oldest round first."""
        if len(self) and (self.rounds == self.rounds[0]).all():
            return [(int(self.rounds[0]), self)]
        return [(int(r), self[self.rounds == r]) for r in np.unique(self.rounds)]


class JobBook:
    """The jobs of one source that are in flight: a row for each busy client.

    A job is written down when its client is asked, marked when the client reports, and struck out when its update is
    taken or nobody waits for it any longer.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.asked = 0
        """How many jobs there have been."""
        self.bad = 0
        """How many updates in a row, up to the last, had a number that is not finite."""
        self._held: set[int] = set()
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(0, np.int64) for name in _WHOLE}
        self._columns |= {name: np.zeros(0) for name in _TIMES}

    def __len__(self) -> int:
        return len(self._columns["client"])

    def clients(self) -> set[int]:
        """The clients that are busy."""
        return set(self._columns["client"].tolist())

    def rounds(self) -> set[int]:
        """The rounds whose messages are still needed: of jobs in flight, and of those being taken."""
        return set(self._columns["round"].tolist()) | self._held

    def unreported(self) -> Jobs:
        """The jobs whose clients have not reported."""
        return self._jobs(np.flatnonzero(np.isinf(self._columns["reported"])))

    def add(self, clients: Numbers, round: int, version: int, now: float) -> Jobs:
        """Writes down that these clients are asked now."""
        news = {
            "client": clients,
            "round": np.full_like(clients, round),
            "version": np.full_like(clients, version),
            "number": np.arange(self.asked, self.asked + len(clients)),
            "asked": np.full(len(clients), now),
            "reported": np.full(len(clients), np.inf),
        }
        before = len(self)
        self._columns = {name: np.concatenate([x, news[name]]) for name, x in self._columns.items()}
        self.asked += len(clients)
        return self._jobs(np.arange(before, len(self)))

    def mark(self, numbers: Numbers, times: Times) -> None:
        """Notes when these jobs were reported."""
        self._columns["reported"][self._rows(numbers)] = times

    def of(self, numbers: Numbers) -> Jobs:
        """The jobs in flight of these numbers."""
        return self._jobs(self._rows(numbers))

    def first_asked(self) -> float:
        """When the job was asked that has waited longest for a report; infinite where all have reported."""
        waiting = self._columns["asked"][np.isinf(self._columns["reported"])]
        return float(waiting.min()) if len(waiting) else np.inf

    def give_up(self, patience: float, now: float) -> Jobs:
        """Strikes out the jobs that have waited so long for a report."""
        columns = self._columns
        return self._take(np.flatnonzero(np.isinf(columns["reported"]) & (columns["asked"] + patience <= now)))

    def strike(self, numbers: Numbers) -> Jobs:
        """Strikes out these jobs, which will never be reported."""
        rows, column = self._rows(numbers), self._columns["number"]
        known = rows < len(column)
        struck = np.zeros(len(column), np.bool_)
        struck[rows[known]] = column[rows[known]] == numbers[known]
        return self._take(np.flatnonzero(struck))

    def take_late(self, round: int, since: float, before: float) -> Jobs:
        """Strikes out what was asked in an earlier round and reported between the two times.

        What had been reported by the time ``since``, when this round began, was not late: it waits for a buffer to
        fill.
        """
        columns = self._columns
        return self._take(self._reported(before, (columns["round"] < round) & (columns["reported"] >= since)))

    def reported(self, before: float, limit: int | None = None, multiple: int = 1) -> Jobs:
        """What was reported before this time, the first first: at most ``limit`` jobs, a multiple of ``multiple``."""
        rows = self._reported(before, True)[:limit]
        return self._jobs(rows[: len(rows) // multiple * multiple])

    def take(self, jobs: Jobs) -> None:
        """Strikes these jobs out, to be collected; their messages are needed until :meth:`end_round`."""
        self.strike(jobs.numbers)

    def end_round(self) -> None:
        """All jobs that were taken have been collected or discarded."""
        self._held.clear()

    def tree(self) -> dict[str, Any]:
        """The book as a tree."""
        columns = {name: torch.from_numpy(x) for name, x in self._columns.items()}
        return {"asked": self.asked, "bad": self.bad, "jobs": columns}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes up the book of a checkpoint."""
        self.asked, self.bad = int(saved["asked"]), int(saved["bad"])
        self._columns = {name: saved["jobs"][name].cpu().numpy() for name in self._columns}

    def _reported(self, before: float, which: NDArray[np.bool_] | bool) -> Numbers:
        columns = self._columns
        rows = np.flatnonzero((columns["reported"] < before) & which)
        return rows[np.lexsort((columns["number"][rows], columns["reported"][rows]))]

    def _rows(self, numbers: Numbers) -> Numbers:
        """Where jobs stand; their numbers ascend."""
        return np.searchsorted(self._columns["number"], numbers)

    def _jobs(self, rows: Numbers) -> Jobs:
        return Jobs(self.source, *(self._columns[name][rows] for name in (*_WHOLE, "asked")))

    def _take(self, rows: Numbers) -> Jobs:
        taken = self._jobs(rows)
        self._held |= set(taken.rounds.tolist())
        kept = np.ones(len(self), np.bool_)
        kept[rows] = False
        self._columns = {name: x[kept] for name, x in self._columns.items()}
        return taken
