"""Who is asked, and when."""

from __future__ import annotations

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


def sample_cohort(seed: int, round: int, source: str, population: int, size: int) -> NDArray[np.int64]:
    """Distinct clients, uniformly, in increasing order; the cost follows ``size``, not ``population``."""
    draw = rng.generator(seed, f"cohort/{source}", round)
    return np.sort(draw.choice(population, size, replace=False)).astype(np.int64)
