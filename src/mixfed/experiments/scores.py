"""What runs are judged by: the names of a recipe's metrics, a run's best of them, and several runs as one figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mixfed.errors import InputError
from mixfed.experiments import own
from mixfed.experiments.beforehand import BY_CLASS, require_one_number
from mixfed.experiments.recipe import Recipe

_SMALL_IS_GOOD = ("loss", "parity_gap", "odds_gap", "calibration_error")
_OF_THEIR_OWN = {"adversary": "adversary_auc", "postfit": "postfit_auc"}
"""Evaluation sets that have one metric, whatever the recipe's metrics are."""


def metric_names(recipe: Recipe) -> list[str]:
    """The names of all metrics of a run of the recipe that are one number: each metric on each evaluation set."""
    metrics = [own.short(name) for name in recipe.evaluate.metrics if name != BY_CLASS]
    sets = recipe.evaluate.sets
    plain = [name for name in sets if name not in _OF_THEIR_OWN]
    found = [metric if name == "all" else f"{metric}_{name}" for name in plain for metric in metrics]
    return found + [_OF_THEIR_OWN[name] for name in sets if name in _OF_THEIR_OWN]


def require_metric(recipe: Recipe, metric: str) -> None:
    """Refuses, before a run, a metric that it will not have."""
    require_one_number(metric)
    known = metric_names(recipe)
    if metric not in known:
        raise InputError(
            f"The runs of {recipe.algorithm} have no metric '{metric}'; they have {', '.join(known)}"
            " (evaluate.metrics and evaluate.sets say which)."
        )


def best_of_last(history: Sequence[Mapping[str, Any]], metric: str, last: int) -> float | None:
    """The best value of the metric in the last so many evaluations; None where none is a number."""
    values = [entry[metric] for entry in history[-last:] if is_number(entry[metric])]
    if not values:
        return None
    return float(min(values) if small_is_good(metric) else max(values))


def score(history: Sequence[Mapping[str, Any]], metric: str, last: int) -> float | None:
    """What a run is chosen by: its best of the last evaluations; None where it ended with a loss that is no number."""
    found = best_of_last(history, metric, last)
    end = history[-1] if history else {}
    ended_well = all(is_number(value) for name, value in end.items() if name == metric or name.startswith("loss"))
    return found if ended_well else None


def spread_of(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and sample standard deviation; null where a run has no number to give."""
    numbers = [v for v in values if v is not None]
    if len(numbers) < len(values):
        return {"mean": None, "spread": None, "values": list(values)}
    spread = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else 0.0
    return {"mean": float(np.mean(numbers)), "spread": spread, "values": list(values)}


def half_interval(values: Sequence[float]) -> float | None:
    """Half the width of Student's 95% interval of the mean, t₀.₉₇₅(n − 1)·s/√n; there is none of one value."""
    from scipy.special import stdtrit

    n = len(values)
    return float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else None


def small_is_good(metric: str) -> bool:
    """Whether the smaller value of the metric is the better one."""
    return metric.startswith(_SMALL_IS_GOOD)


def is_number(value: float | None) -> bool:
    """Whether it is there and finite."""
    return value is not None and math.isfinite(value)
