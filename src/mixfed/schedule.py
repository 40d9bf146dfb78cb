"""Who is asked, and when."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mixfed import rng
from mixfed.data.store import FederatedData
from mixfed.errors import InputError


@dataclass(frozen=True)
class Schedule:
    """The synchronous schedule: every round asks ``cohort`` clients of each source and waits for all of them.

    ``cohort`` is one number for every source, or a number by source.
    """

    cohort: int | Mapping[str, int]

    def size(self, source: str) -> int:
        """Clients of this source in a round."""
        if isinstance(self.cohort, int):
            return self.cohort
        if source not in self.cohort:
            raise InputError(f"The schedule names no cohort for the clients '{source}'.")
        return self.cohort[source]

    def check(self, source: str, data: FederatedData) -> None:
        """Refuses a cohort that the population cannot give."""
        size = self.size(source)
        if not 1 <= size <= len(data):
            raise InputError(
                f"A cohort of {size} clients cannot be drawn from the {len(data)} clients of '{source}';"
                f" choose between 1 and {len(data)}."
            )


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


def sample_cohort(seed: int, round: int, source: str, population: int, size: int) -> NDArray[np.int64]:
    """Distinct clients, uniformly, in increasing order; the cost follows ``size``, not ``population``."""
    draw = rng.generator(seed, f"cohort/{source}", round)
    return np.sort(draw.choice(population, size, replace=False)).astype(np.int64)
