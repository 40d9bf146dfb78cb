"""Tables of stored figures, for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mixfed.experiments.report.tables import amount
from mixfed.experiments.reproduce.definition import Definition, is_quotient
from mixfed.experiments.reproduce.judge import HOLDS, NOT_TRIED, PARTLY, SENT, judge, values_of
from mixfed.experiments.reproduce.store import Record, Stored
from mixfed.experiments.scores import spread_of

Rows = list[list[str]]
NOTHING = "–"
_SHARES = ("accuracy", "auc", "recall", "f1", "adversary_auc", "postfit_auc", "parity_gap", "odds_gap")
"""Metrics that may be shown in percent."""


def shown(definition: Definition, metric: str, values: Sequence[float | None], *, spread: bool = True) -> str:
    """Figures of some seeds as mean ± sample standard deviation."""
    if not values:
        return NOTHING
    found = spread_of(values)
    if found["mean"] is None:
        stopped = sum(value is None for value in values)
        return "stopped" if stopped == len(values) else f"{stopped} of {len(values)} stopped"
    if metric.startswith("ledger."):
        return cost(metric.removeprefix("ledger."), found["mean"])
    several = spread and len(values) > 1
    return number(definition, metric, found["mean"]) + (
        f" ± {number(definition, metric, found['spread'])}" if several else ""
    )


def number(definition: Definition, metric: str, value: float) -> str:
    """One figure: shares in percent with one digit where the experiment has them so, others with three digits."""
    if definition.percent and metric.startswith(_SHARES):
        return f"{100 * value:.1f}"
    return f"{value:.3f}"


def cost(name: str, value: float) -> str:
    """An entry of the ledger."""
    if SENT.fullmatch(name):
        return f"{value / 1e6:,.1f} M"
    return amount(name.removesuffix("_per_round"), value)


def against_paper(definition: Definition, stored: Stored) -> list[tuple[str, list[str], Rows]]:
    """For each cell a title, the headings and the rows: what is stored of every method, beside the paper's figure."""
    found = []
    for cell in definition.cells:
        methods = [m for m in definition.runs if cell.label in definition.cells_of(m)]
        metrics = list(
            dict.fromkeys([definition.metric, *(key.partition(" @ ")[0] for m in methods for key in m.paper)])
        )
        known = [m for m in metrics if any(definition.published(x.label, cell.label, m) is not None for x in methods)]
        head = ["", *(word for m in metrics for word in ([m, "paper"] if m in known else [m])), "seeds"]
        rows = []
        for method in methods:
            row = [method.label]
            for metric in metrics:
                values = list(values_of(definition, stored, method.label, cell.label, metric).values())
                row.append(shown(definition, metric, values))
                if metric in known:
                    row.append(paper(definition, method.label, cell.label, metric))
            count = len(values_of(definition, stored, method.label, cell.label, definition.metric))
            rows.append([*row, str(count)])
        title = f"{definition.name}{f' · {cell.label}' if cell.label else ''}"
        found.append((title, head, rows))
    return found


def paper(definition: Definition, label: str, cell: str, metric: str) -> str:
    """The paper's figure."""
    value = definition.published(label, cell, metric)
    return NOTHING if value is None else number(definition, metric, value)


def claim_rows(definition: Definition, stored: Stored) -> Rows:
    """The verdict, the text and the evidence of every claim."""
    return [[entry["verdict"], entry["claim"], evidence(definition, entry)] for entry in judge(definition, stored)]


def evidence(definition: Definition, entry: Record) -> str:
    """The comparisons behind a verdict in words: the one whose interval reaches farthest from what is claimed."""
    tried = [c for c in entry["comparisons"] if "ahead" in c]
    if not tried:
        stopped = any("stopped" in c for c in entry["comparisons"])
        return "runs stopped" if stopped else "no runs are stored"
    claim = next(claim for claim in definition.claims if claim.text == entry["claim"])
    least = min(tried, key=lambda c: (-abs(c["ahead"]) if claim.near else c["ahead"]) - (c["half"] or 0.0))
    word = "from" if claim.near else "ahead of"
    ours, theirs = (f" ({entry['metric']})", f" ({claim.of_metric})") if claim.of_metric else ("", "")
    other = f"{_term(definition, entry['metric'], least['b'])}{theirs}"
    told = f"{least['a']}{ours} {word} {other} by {_interval(definition, entry['metric'], least)}"
    where = f" at {least['cell']}" if least.get("cell") else ""
    if len(entry["comparisons"]) == 1:
        return told + where
    return f"{_counts([c['verdict'] for c in entry['comparisons']])}; least: {told}{where}"


def _counts(verdicts: Sequence[str]) -> str:
    """How many of some comparisons hold, and how many of the rest hold partly or were not tried."""
    told = f"{verdicts.count(HOLDS)} of {len(verdicts)} comparisons hold"
    partly, untried = verdicts.count(PARTLY), verdicts.count(NOT_TRIED)
    return told + (f", {partly} partly" if partly else "") + (f", {untried} not tried" if untried else "")


def _term(definition: Definition, metric: str, term: Any) -> str:
    """A label; or a number, as the metric's figures are shown."""
    plain = isinstance(term, str) or metric.startswith("ledger.")
    return str(term) if plain else number(definition, metric, term)


def _interval(definition: Definition, metric: str, comparison: Record) -> str:
    if metric.startswith("ledger.") and is_quotient(comparison["a"]):
        return f"{comparison['ahead']:.3f}".replace("-", "−")
    if metric.startswith("ledger."):
        sign = "−" if comparison["ahead"] < 0 else ""
        return sign + cost(metric.removeprefix("ledger."), abs(comparison["ahead"]))
    mean = number(definition, metric, comparison["ahead"]).replace("-", "−")
    half = comparison["half"]
    seeds = len(comparison["seeds"])
    return f"{mean} (one seed)" if half is None else f"{mean} ± {number(definition, metric, half)} ({seeds} seeds)"
