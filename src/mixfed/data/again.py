"""Another file read as a run read its own: with the classes, categories and scales that the run remembered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    return Scaling.from_json(learnt["scaling"])(arrays) if learnt["scaling"] else arrays
