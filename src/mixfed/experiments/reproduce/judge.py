"""Do the claims of an experiment hold? Paired differences over seeds decide.

A and B were run with the same seeds, so that a seed's data, clients and initial parameters are the same for both: the
differences dₛ = Aₛ − Bₛ of the seeds are what is asked, with Student's 95% interval of their mean,
d̄ ± t₀.₉₇₅(n − 1)·s/√n. With three seeds t is 4.3, so that an interval is wide unless the seeds agree.

========  =========================  ===========================  =================
claim     holds                      holds partly                 does not hold
========  =========================  ===========================  =================
A ahead   the interval is above by   the mean is, not all of it   the mean is not
A near    the interval is in ±by     the mean is, not all of it   the mean is not
========  =========================  ===========================  =================

One seed has no interval and holds partly at best. What is a smaller number (a loss, a cost) is ahead by being smaller.
A run that stopped because it diverged is behind every run that did not. A claim of several comparisons holds if each
does, does not hold if none does, and holds partly otherwise, also where runs of some comparisons are missing.
Intervals are not corrected for the number of claims.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mixfed.experiments.reproduce.definition import Claim, Definition, is_quotient, term_of
from mixfed.experiments.reproduce.plan import Key
from mixfed.experiments.reproduce.store import Record, Stored
from mixfed.experiments.scores import half_interval, small_is_good

HOLDS, PARTLY, DOES_NOT, NOT_TRIED = "holds", "holds partly", "does not hold", "not tried here"
DIGITS = 5
SENT = re.compile(r"sent(?: \((\d+) down\))?")
"""A cost that is counted in parameters."""
Values = Mapping[int, float | None]
"""A figure by seed; None for a run that stopped."""


@dataclass(frozen=True)
class Difference:
    """The paired differences of two figures, and their mean with its 95% interval (none of one seed)."""

    values: dict[int, float]
    mean: float
    half: float | None

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return -math.inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return math.inf if self.half is None else self.mean + self.half


def figure_of(record: Record, metric: str, last: int) -> float | None:
    """A figure of a run: ``METRIC``, the best of the ``last`` evaluations; ``METRIC (last)``, the last one;
    ``METRIC (ROUND)``, the one after so many rounds; ``ledger.NAME``, what it cost; ``diagnostics.NAME``, a mean over
    rounds of what its algorithm told of itself; ``seconds``."""
    if metric == "seconds":
        return float(record["seconds"])
    if metric.startswith("diagnostics."):
        told: float | None = record.get("diagnostics", {}).get(metric.removeprefix("diagnostics."))
        return told
    if metric.startswith("ledger."):
        return cost_of(record, metric.removeprefix("ledger."))
    if record.get("stopped"):
        return None
    name, _, when = metric.partition(" (")
    values = record["metrics"].get(name, [])
    if when.rstrip(")").isdigit():
        rounds = record["metrics"].get("round", [])
        values = [v for v, at in zip(values, rounds, strict=True) if at == int(when.rstrip(")"))]
    values = values[-1:] if when else values[-last:]
    numbers = [float(v) for v in values if v is not None]
    return None if not numbers else (min if small_is_good(name) else max)(numbers)


def cost_of(record: Record, name: str) -> float | None:
    """An entry of a run's ledger; ``sent`` is the number of parameters down and up, of 4 bytes each.

    ``sent (10 down)`` counts what goes down ten times: some count a model as sent to all devices, of which a tenth is
    asked.
    """
    ledger = record["ledger"]
    sent = SENT.fullmatch(name)
    if sent:
        return (int(sent[1] or 1) * ledger["bytes_down"] + ledger["bytes_up"]) / 4 if "bytes_up" in ledger else None
    if name.endswith("_per_round"):
        value = ledger.get(name.removesuffix("_per_round"))
        return None if value is None else value / max(record["rounds"], 1)
    value = ledger.get(name)
    return None if value is None else float(value)


def values_of(definition: Definition, stored: Stored, label: str, cell: str, metric: str) -> Values:
    """A method's figure by seed, of the seeds that the experiment has."""
    method = definition.method(label)
    keys = [Key(label, cell, seed) for seed in method.seeds or definition.seeds]
    return {key.seed: figure_of(stored.runs[key], metric, definition.last) for key in keys if key in stored.runs}


def term_values(definition: Definition, stored: Stored, term: Any, cell: str, metric: str) -> Values | float:
    """The figure of a term by seed, or the number that the term is."""
    if not isinstance(term, str):
        return float(term)
    found = [values_of(definition, stored, label, own or cell, metric) for label, own in term_of(term)]
    if len(found) == 1:
        return found[0]
    a, b = found
    of_both = _over if is_quotient(term) else _minus
    return {seed: of_both(a[seed], b[seed]) for seed in a if seed in b}


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def difference(values: Mapping[int, float]) -> Difference:
    """The mean of differences and half the width of its 95% interval."""
    numbers = list(values.values())
    return Difference(dict(values), float(np.mean(numbers)), half_interval(numbers))


def smaller_is_better(metric: str) -> bool:
    """Whether the smaller figure is ahead."""
    return metric.startswith("ledger.") or metric == "seconds" or small_is_good(metric)


def judge(definition: Definition, stored: Stored) -> list[Record]:
    """What the file says of every claim: its verdict, and each comparison with its interval."""
    return [_judged(definition, stored, claim) for claim in definition.claims]


def _judged(definition: Definition, stored: Stored, claim: Claim) -> Record:
    metric = claim.metric or definition.metric
    found = [_compared(definition, stored, claim, a, b, cell, metric) for a, b, cell in _pairs(definition, claim)]
    tried = [entry["verdict"] for entry in found if entry["verdict"] != NOT_TRIED]
    verdict = combined(tried)
    if verdict == HOLDS and len(tried) < len(found):
        verdict = PARTLY
    return {"claim": claim.text, "metric": metric, "verdict": verdict, "comparisons": found}


def combined(verdicts: list[str]) -> str:
    """One verdict of several."""
    tried = [verdict for verdict in verdicts if verdict != NOT_TRIED]
    if not tried:
        return NOT_TRIED
    if all(verdict == HOLDS for verdict in tried):
        return HOLDS
    return DOES_NOT if all(verdict == DOES_NOT for verdict in tried) else PARTLY


def _pairs(definition: Definition, claim: Claim) -> list[tuple[Any, Any, str]]:
    if claim.order:
        pairs = list(zip(claim.order, claim.order[1:], strict=False))
    else:
        pairs = [(a, b) for a in claim.ahead or claim.near for b in claim.of]
    cells = claim.cells or [cell.label for cell in definition.cells]
    found: list[tuple[Any, Any, str]] = []
    for a, b in pairs:
        named = [cell for term in (a, b) if isinstance(term, str) for _, cell in term_of(term)]
        for cell in [""] if named and all(named) else cells:
            if _is_planned(definition, (a, b), cell):
                found.append((a, b, cell))
    return found


def _is_planned(definition: Definition, terms: tuple[Any, Any], cell: str) -> bool:
    parts = [part for term in terms if isinstance(term, str) for part in term_of(term)]
    return all((own or cell) in definition.cells_of(definition.method(label)) for label, own in parts)


def _compared(definition: Definition, stored: Stored, claim: Claim, a: Any, b: Any, cell: str, metric: str) -> Record:
    entry: Record = {"a": a, "b": b} | ({"cell": cell} if cell else {})
    ours = term_values(definition, stored, a, cell, metric)
    theirs = term_values(definition, stored, b, cell, claim.of_metric or metric)
    if isinstance(ours, float):
        ours = dict.fromkeys(theirs, ours) if not isinstance(theirs, float) else {0: ours}
    if isinstance(theirs, float):
        theirs = dict.fromkeys(ours, theirs)
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return entry | {"verdict": NOT_TRIED}
    if any(ours[seed] is None or theirs[seed] is None for seed in seeds):
        return entry | _of_stopped(claim, [ours[s] for s in seeds], [theirs[s] for s in seeds])
    sign = -1.0 if smaller_is_better(metric) else 1.0
    found = difference({s: sign * ((ours[s] or 0.0) - (theirs[s] or 0.0)) for s in seeds})
    mean, half = _short(found.mean), None if found.half is None else _short(found.half)
    return entry | {"seeds": seeds, "ahead": mean, "half": half, "verdict": _verdict(claim, found)}


def _of_stopped(claim: Claim, ours: list[float | None], theirs: list[float | None]) -> Record:
    stopped = [sum(value is None for value in values) for values in (ours, theirs)]
    holds = not claim.near and not stopped[0]
    return {"stopped": stopped, "verdict": (HOLDS if stopped[1] == len(theirs) else PARTLY) if holds else DOES_NOT}


def _verdict(claim: Claim, found: Difference) -> str:
    if claim.near:
        inside = -claim.by <= found.low and found.high <= claim.by
        return HOLDS if inside else PARTLY if abs(found.mean) <= claim.by else DOES_NOT
    return HOLDS if found.low > claim.by else PARTLY if found.mean > claim.by else DOES_NOT


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
