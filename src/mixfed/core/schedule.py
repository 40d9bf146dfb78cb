"""Who is asked, and when."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mixfed import rng
from mixfed.core.delays import Delay, none
from mixfed.data.store import FederatedData
from mixfed.errors import InputError

Late = Literal["", "discard", "use"]


@dataclass(frozen=True)
class Joining:
    """The last client of the population joins in round ``round``, to which the others have trained without it.

    From then on every round asks it, and the share ``fraction`` of the others. Where clients keep a part of the model,
    the server takes nothing in the first ``settle`` of these rounds: the device learns its own part first.
    """

    round: int
    fraction: float
    settle: int = 0

    def __post_init__(self) -> None:
        if self.round < 1 or not 0 <= self.fraction <= 1 or self.settle < 0:
            raise InputError("A device joins after 1 or more rounds, beside a share from 0 to 1 of the others.")

    def settling(self, round: int) -> bool:
        """Whether the server is to take nothing in this round."""
        return self.round <= round < self.round + self.settle

    def cohort(self, seed: int, round: int, source: str, population: int, size: int) -> NDArray[np.int64]:
        """Who is asked in this round."""
        if round < self.round:
            return sample_cohort(seed, round, source, population - 1, size)
        others = sample_cohort(seed, round, source, population - 1, math.floor(self.fraction * (population - 1)))
        return np.append(others, population - 1)


@dataclass(frozen=True)
class Schedule:
    """Who is asked, when their replies count, and how long they take on a virtual clock whose unit is a round.

    ``cohort`` is one number for every source, or a number by source. Every round asks that many clients that are not
    busy, and what has come back before the round ends is one step of the server. With no delays (the default) that is
    synchronous training.

    ``delays`` says how long clients take (:mod:`mixfed.core.delays`). ``buffer`` makes a step of exactly so many
    updates in the order of their arrival (0: as the algorithm says, else all of a round). With ``concurrency`` so many
    clients are busy at all times, each replaced when it reports, and a round ends when the buffer is full.
    ``late`` overrides what the algorithm does with updates from an earlier round: discard or use them. A client that
    has not reported after ``patience`` rounds is given up and may be asked again (0: never). ``joining`` is a client
    that comes later, to a synchronous schedule.
    """

    cohort: int | Mapping[str, int]
    delays: Delay = none
    buffer: int = 0
    concurrency: int = 0
    late: Late = ""
    patience: float = 0.0
    joining: Joining | None = None

    def __post_init__(self) -> None:
        if self.buffer < 0 or self.concurrency < 0 or self.patience < 0:
            raise InputError("Buffer, concurrency and patience of a schedule cannot be negative.")
        if self.late not in ("", "discard", "use"):
            raise InputError(f"Late updates are discarded or used; the schedule says '{self.late}'.")
        if self.concurrency and not isinstance(self.cohort, int):
            raise InputError("A schedule with a concurrency has one cohort for the one population it asks.")
        if self.joining and not self.is_synchronous:
            raise InputError("A device joins synchronous training; leave out delays, buffer and concurrency.")

    @property
    def is_synchronous(self) -> bool:
        """Whether every round asks a cohort and waits for all of it."""
        return self.delays is none and not self.buffer and not self.concurrency

    def size(self, source: str) -> int:
        """Clients of this source in a round."""
        if isinstance(self.cohort, int):
            return self.cohort
        if source not in self.cohort:
            raise InputError(f"The schedule names no cohort for the clients '{source}'.")
        return self.cohort[source]

    def check(self, source: str, data: FederatedData, buffer: int = 0) -> None:
        """Refuses a cohort, and a buffer (the schedule's, else the algorithm's), that the population cannot give."""
        asked, step = self.concurrency or self.size(source), self.buffer or buffer or self.size(source)
        there = len(data) - 1 if self.joining else len(data)
        if not 1 <= asked <= there:
            raise InputError(
                f"A cohort of {asked} clients cannot be drawn from the {there} clients of '{source}';"
                f" choose between 1 and {there}."
            )
        if not 1 <= step <= len(data):
            raise InputError(
                f"A step cannot be made of {step} updates of the {len(data)} clients of '{source}'; choose a buffer"
                f" (without one, a cohort) between 1 and {len(data)}."
            )


def sample_cohort(
    seed: int, round: int, source: str, population: int, size: int, busy: Collection[int] = (), attempt: int = 0
) -> NDArray[np.int64]:
    """Distinct clients that are not busy, uniformly, in increasing order; all there are where these are fewer.

    The cost follows ``size`` and the number of busy clients, not ``population``.
    """
    draw = rng.generator(seed, f"cohort/{source}", round, *([attempt] if attempt else []))
    if not busy:
        return np.sort(draw.choice(population, size, replace=False)).astype(np.int64)
    if population <= 2 * (len(busy) + size):
        free = np.setdiff1d(np.arange(population), np.fromiter(busy, np.int64, len(busy)))
        return np.sort(draw.choice(free, min(size, len(free)), replace=False)).astype(np.int64)
    chosen: dict[int, None] = {}
    while len(chosen) < size:  # at least half of the population is free, so this ends soon
        chosen |= {c: None for c in draw.integers(population, size=size).tolist() if c not in busy}
    return np.sort(np.fromiter(list(chosen)[:size], np.int64, size))
