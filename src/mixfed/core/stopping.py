"""Rules that end a run before its last round: no progress on a metric, so many minutes, so many bytes.

A rule is a callback: it sees the record of every round, and ends the run by returning a sentence. It keeps nothing of
its own, because all that it needs is in the record; so a resumed run ends where the undisturbed one does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixfed.core.loop import Record
from mixfed.errors import InputError


@dataclass(frozen=True)
class Stopping:
    """Ends a run once ``metric`` was not better than before in ``patience`` evaluations in a row, after so many
    ``minutes`` of training, or once so many ``bytes`` were sent (0: no such rule)."""

    metric: str = ""
    patience: int = 5
    smaller_is_better: bool = False
    minutes: float = 0.0
    bytes: int = 0

    def __post_init__(self) -> None:
        if self.patience < 1 or self.minutes < 0 or self.bytes < 0:
            raise InputError("The patience of a run is at least 1, and its minutes and bytes are not below 0.")

    def __call__(self, record: Record) -> str | None:
        """Why the run ends here, if it does. It ends where it was evaluated, so that its last figures are its own."""
        if not record.metrics:
            return None
        sent = record.ledger["bytes_down"] + record.ledger["bytes_up"]
        if self.minutes and record.seconds >= 60 * self.minutes:
            return f"{self.minutes:g} minutes are over."
        if self.bytes and sent >= self.bytes:
            return f"{sent:,} bytes were sent, and {self.bytes:,} were allowed."
        if self.metric:
            best = best_round(record.history, self.metric, self.smaller_is_better)
            since = sum(entry["round"] > best for entry in record.history) if best is not None else 0
            if since >= self.patience:
                return f"The {self.metric} was best in round {best}, {since} evaluations ago."
        return None


def best_round(history: Sequence[Mapping[str, Any]], metric: str, smaller: bool) -> int | None:
    """The first round with the best value of the metric; None where it never was a number."""
    known = [e for e in history if isinstance(e.get(metric), int | float) and math.isfinite(e[metric])]
    if not known:
        return None
    return int(min(known, key=lambda e: (e[metric] if smaller else -e[metric], e["round"]))["round"])
