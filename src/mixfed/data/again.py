"""Another file read as a run read its own: with the classes, categories and scales that the run remembered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays
from mixfed.data.columns import read_columns
from mixfed.data.encoding import Encoding
from mixfed.data.scaling import Scaling


def read_like(file: str | Path, learnt: Mapping[str, Any], *, labels: bool = True) -> Arrays:
    """The examples of a file; ``learnt`` is what :meth:`mixfed.data.scenario.Scenario.learnt` gave (data.json).

    Without ``labels`` the file needs none.
    """
    encoding = Encoding.from_json(learnt["encoding"])
    if not labels:
        encoding = encoding.without_labels()
    wanted = [column for columns in encoding.fields.values() for column in columns]
    arrays = encoding.encode(read_columns(Path(file), wanted), "examples")
    return _scaling(learnt)(arrays)


def as_measured(answers: NDArray[np.float32], learnt: Mapping[str, Any]) -> NDArray[np.float32]:
    """What a network of the run answers, in the unit that the labels have in its files."""
    return _scaling(learnt).measured(answers)


def _scaling(learnt: Mapping[str, Any]) -> Scaling:
    return Scaling.from_json(learnt["scaling"]) if learnt["scaling"] else Scaling({}, {})
