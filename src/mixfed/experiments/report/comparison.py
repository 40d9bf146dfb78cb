"""Several runs of several algorithms as one result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def compare_results(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What comparison.json holds: for every algorithm, each metric's mean, spread and values, and the mean ledger."""
    return {"algorithms": {name: _summary(runs) for name, runs in results.items()}}


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    metrics = {name: spread_of([run["metrics"].get(name) for run in runs]) for name in runs[0]["metrics"]}
    ledger = {name: round(float(np.mean([run["ledger"][name] for run in runs]))) for name in runs[0]["ledger"]}
    return {"metrics": metrics, "ledger": ledger}


def spread_of(values: list[float | None]) -> dict[str, Any]:
    """Mean and sample standard deviation; null where a run has no number to give."""
    numbers = [v for v in values if v is not None]
    if len(numbers) < len(values):
        return {"mean": None, "spread": None, "values": values}
    spread = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else 0.0
    return {"mean": float(np.mean(numbers)), "spread": spread, "values": values}
