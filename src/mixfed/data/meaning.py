"""What a model's answers mean: which class has which name, and in which unit a measurement is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Meaning:
    """Labels are one of so many ``classes``, which may have ``names``, or measurements.

    A measurement y was brought to (y − ``mean``) / ``deviation`` before it was learnt.
    """

    classes: int | None = None
    names: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    def name(self, number: int) -> str:
        """What a class is called: its name, or else its number."""
        return self.names[number] if number < len(self.names) else str(number)

    def named(self, numbers: Tensor) -> Tensor | NDArray[np.str_]:
        """Classes by their names, where they have some."""
        if not self.names:
            return numbers
        return np.array([self.name(n) for n in numbers.flatten().tolist()]).reshape(tuple(numbers.shape))

    def measured(self, answers: Tensor) -> Tensor:
        """Answers about scaled labels in the unit that the labels had before."""
        return answers * self.deviation + self.mean if (self.mean, self.deviation) != (0.0, 1.0) else answers

    def to_json(self) -> dict[str, Any]:
        """The same for a file; :meth:`from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Meaning:
        """What was written."""
        return cls(**{**told, "names": tuple(told["names"])})


UNKNOWN = Meaning()
"""Of a model of which nothing is known."""
