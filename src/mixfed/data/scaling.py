"""Fields brought to mean 0 and deviation 1, by figures of training examples alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays
from mixfed.data.sources.base import Examples

Numbers = NDArray[np.float32]
FURTHEST = 10.0


@dataclass(frozen=True, eq=False)
class Scaling:
    """(values − mean) / deviation of each field named here; numbers of a column have figures of their own.

    Features that are further away than ``FURTHEST`` deviations are brought there: one mistyped number would else throw
    a client's model off.
    """

    mean: dict[str, Numbers]
    deviation: dict[str, Numbers]

    def __call__(self, arrays: Arrays) -> Arrays:
        """The arrays, scaled, as far as they have these fields."""
        found = {n: (arrays[n] - mean) / self.deviation[n] for n, mean in self.mean.items() if n in arrays}
        return arrays | {n: x if n == "y" else np.clip(x, -FURTHEST, FURTHEST) for n, x in found.items()}

    def to_json(self) -> dict[str, Any]:
        """The figures, for a file; :meth:`from_json` makes the same of them."""
        return {
            "mean": {name: values.tolist() for name, values in self.mean.items()},
            "deviation": {name: values.tolist() for name, values in self.deviation.items()},
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Scaling:
        """The figures that were remembered."""
        return cls(*({n: np.array(v, np.float32) for n, v in told[key].items()} for key in ("mean", "deviation")))


def fit_scaling(columns: Mapping[str, NDArray[np.bool_] | None], sides: Sequence[Arrays]) -> Scaling:
    """The scaling by the examples of all sides together, of the fields in ``columns``.

    These say which numbers of an example are scaled, each by itself; with None one pair of figures serves all.
    """
    mean: dict[str, Numbers] = {}
    deviation: dict[str, Numbers] = {}
    for name, chosen in columns.items():
        axis = None if chosen is None else 0
        parts = [side[name].astype(np.float64) for side in sides if len(side[name])]
        count = sum(part.size if axis is None else len(part) for part in parts)
        middle = sum(part.sum(axis=axis) for part in parts) / count
        spread = np.sqrt(sum(np.square(part - middle).sum(axis=axis) for part in parts) / count)
        scaled = np.ones_like(spread, np.bool_) if chosen is None else chosen
        mean[name] = np.where(scaled, middle, 0.0).astype(np.float32)
        deviation[name] = np.where(scaled & (spread > 0), spread, 1.0).astype(np.float32)
    return Scaling(mean, deviation)


def scaled(examples: Examples, scaling: Scaling) -> Examples:
    """The examples with their fields scaled."""
    return replace(examples, arrays=scaling(examples.arrays))
