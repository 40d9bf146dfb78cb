"""Whether any method has learnt something: the best of them all may still be no better than to guess."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mixfed.core.alarms import BETTER
from mixfed.core.loop import OnSets
from mixfed.core.private import PrivateStore
from mixfed.data.store import CentralData
from mixfed.experiments.build import Experiment
from mixfed.experiments.report.tables import figure
from mixfed.experiments.scores import small_is_good

WAY_OUT = (
    " So the order of the methods means nothing yet: give them more rounds or other rates, and look whether labels"
    " belong to their examples."
)


def nothing_learnt(experiment: Experiment, metric: str, best: float) -> str:
    """A sentence if the best figure of all methods is no better than guessing, and nothing else.

    ``experiment`` has one model for all and is judged by the metric on validation data. To guess is to give the
    commonest answer of all, or to take the model as it was before training. A few examples may be right by luck, so an
    accuracy has to be ahead by two standard errors.
    """
    began = experiment.evaluate(experiment.algorithm.model.initial(), PrivateStore(dict)).get(metric)
    sets = experiment.evaluate.sets if isinstance(experiment.evaluate, OnSets) else {}
    common = _commonest(sets) if metric.startswith("accuracy") else None
    told = f"No method has learnt anything: the best {metric}, {figure(best)}, is no better than"
    if common is not None:
        share, examples = common
        if best <= share + 2 * math.sqrt(share * (1 - share) / examples):
            return f"{told} always the commonest answer ({figure(share)} of {examples:,} examples).{WAY_OUT}"
    if began is None or not math.isfinite(began):
        return ""
    ahead = (began - best) if small_is_good(metric) else (best - began)
    return "" if ahead > BETTER * abs(began) else f"{told} before training ({figure(began)}).{WAY_OUT}"


def _commonest(sets: Mapping[str, CentralData]) -> tuple[float, int] | None:
    """The share of the commonest label, and of how many; None where labels are no classes."""
    labels = next((data.arrays["y"] for data in sets.values() if "y" in data.arrays), None)
    if labels is None or labels.dtype.kind not in "biu" or not labels.size:
        return None
    counts = np.unique(labels, return_counts=True)[1]
    return float(counts.max() / labels.size), labels.size
