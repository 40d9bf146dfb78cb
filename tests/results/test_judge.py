"""Claims are decided by paired differences over seeds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mixfed.experiments.reproduce.definition import load
from mixfed.experiments.reproduce.judge import combined, difference, figure_of, judge
from mixfed.experiments.reproduce.tables import evidence
from tests.results.tiny import made_up, tiny

HEAD = """
title = "t"
recipe = "digits"
metric = "accuracy"
seeds = [0, 1, 2]
[[runs]]
label = "A"
algorithm = "fedavg"
[[runs]]
label = "B"
algorithm = "oracle"
"""


def verdict(tmp_path: Path, claim: str, a: list[float], b: list[float]) -> str:
    definition = load(str(tiny(tmp_path, f"{HEAD}\n[[claims]]\ntext = 'c'\n{claim}")))
    return str(judge(definition, made_up(definition, {"A": a, "B": b}))[0]["verdict"])


def test_the_interval_is_students() -> None:
    """Differences 1, 2, 3: mean 2, s = 1, so half a width of t₀.₉₇₅(2)/√3 = 4.30265/1.73205."""
    found = difference({0: 1.0, 1: 2.0, 2: 3.0})
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)


def test_pairs_decide_not_overlapping_bars(tmp_path: Path) -> None:
    """Seeds differ by far more than the methods do, and each seed has A ahead by about one point."""
    assert verdict(tmp_path, 'ahead = ["A"]\nof = ["B"]', [0.51, 0.712, 0.909], [0.50, 0.70, 0.90]) == "holds"


@pytest.mark.parametrize(
    ("claim", "a", "expected"),
    [
        ('ahead = ["A"]\nof = ["B"]', [0.51, 0.49, 0.56], "holds partly"),
        ('ahead = ["A"]\nof = ["B"]', [0.49, 0.49, 0.49], "does not hold"),
        ('ahead = ["A"]\nof = ["B"]\nby = 0.02', [0.51, 0.512, 0.511], "does not hold"),
        ('ahead = ["A"]\nof = ["B"]\nby = -0.02', [0.49, 0.492, 0.491], "holds"),
        ('near = ["A"]\nof = ["B"]\nby = 0.02', [0.51, 0.512, 0.511], "holds"),
        ('near = ["A"]\nof = ["B"]\nby = 0.02', [0.45, 0.54, 0.51], "holds partly"),
        ('near = ["A"]\nof = ["B"]\nby = 0.02', [0.55, 0.54, 0.53], "does not hold"),
        ('order = ["A", "B"]', [0.6, 0.61, 0.6], "holds"),
        ('order = ["B", "A"]', [0.6, 0.61, 0.6], "does not hold"),
        ('ahead = ["A"]\nof = [0.55]', [0.6, 0.61, 0.6], "holds"),
        ('ahead = ["A - B"]\nof = [0.05]', [0.6, 0.61, 0.6], "holds"),
        ('ahead = ["A / B"]\nof = [1.1]', [0.6, 0.61, 0.6], "holds"),
        ('ahead = ["A / B"]\nof = [1.3]', [0.6, 0.61, 0.6], "does not hold"),
        ('near = ["A / B"]\nof = [1.0]\nby = 0.05\nmetric = "ledger.bytes_up"', [0.6, 0.61, 0.6], "holds"),
        ('ahead = ["A / B"]\nof = [0.9]\nmetric = "ledger.bytes_up"', [0.6, 0.61, 0.6], "does not hold"),
        ('ahead = ["A"]\nof = ["B"]\nmetric = "loss"', [0.6, 0.61, 0.6], "holds"),  # loss is 1 − accuracy there
        ('ahead = ["B"]\nof = ["A"]\nmetric = "loss"', [0.6, 0.61, 0.6], "does not hold"),
    ],
)
def test_verdicts(tmp_path: Path, claim: str, a: list[float], expected: str) -> None:
    assert verdict(tmp_path, claim, a, [0.5, 0.5, 0.5]) == expected


def test_claims_that_contradict_each_other_cannot_both_hold(tmp_path: Path) -> None:
    for a in ([0.6, 0.61, 0.6], [0.4, 0.41, 0.4], [0.5, 0.6, 0.4]):
        both = [verdict(tmp_path, c, a, [0.5] * 3) for c in ('ahead=["A"]\nof=["B"]', 'ahead=["B"]\nof=["A"]')]
        assert both.count("holds") < 2
        assert both.count("holds partly") < 2


def test_one_seed_holds_partly_at_best(tmp_path: Path) -> None:
    definition = load(str(tiny(tmp_path, HEAD + '[[claims]]\ntext = "c"\nahead = ["A"]\nof = ["B"]')))
    stored = made_up(definition, {"A": [0.9] * 3, "B": [0.5] * 3})
    for key in [key for key in stored.runs if key.seed > 0 and key.label == "A"]:
        del stored.runs[key]
    assert judge(definition, stored)[0]["verdict"] == "holds partly"


def test_a_run_that_stopped_is_behind(tmp_path: Path) -> None:
    definition = load(str(tiny(tmp_path, HEAD + '[[claims]]\ntext = "c"\nahead = ["A"]\nof = ["B"]')))
    stored = made_up(definition, {"A": [0.5] * 3, "B": [0.9] * 3})
    for key, record in stored.runs.items():
        if key.label == "B":
            record["stopped"] = "It diverged."
    assert judge(definition, stored)[0]["verdict"] == "holds"


def test_what_was_not_run_is_not_tried_and_what_was_run_in_part_holds_partly(tmp_path: Path) -> None:
    definition = load(str(tiny(tmp_path, HEAD + '[[claims]]\ntext = "c"\nahead = ["A"]\nof = ["B", 0.1]')))
    stored = made_up(definition, {"A": [0.9, 0.9, 0.9], "B": [0.5] * 3})
    part = {key: record for key, record in stored.runs.items() if key.label == "A"}
    stored.runs.clear()
    assert judge(definition, stored)[0]["verdict"] == "not tried here"
    stored.runs.update(part)
    assert judge(definition, stored)[0]["verdict"] == "holds partly"


def test_several_verdicts_as_one() -> None:
    assert combined(["holds", "holds"]) == "holds"
    assert combined(["holds", "does not hold"]) == combined(["holds partly"]) == "holds partly"
    assert combined(["does not hold", "not tried here"]) == "does not hold"
    assert combined([]) == "not tried here"


def test_figures_of_a_run() -> None:
    metrics = {"round": [10, 20, 30], "accuracy": [0.5, 0.8, 0.7], "loss": [3.0, 1.0, 2.0]}
    record = {"metrics": metrics, "ledger": {"bytes_down": 40, "bytes_up": 80, "server_flops": 60}, "rounds": 30}
    assert figure_of(record, "accuracy", 2) == 0.8
    assert figure_of(record, "loss", 2) == 1.0
    assert figure_of(record, "accuracy (last)", 2) == 0.7
    assert figure_of(record, "accuracy (10)", 2) == 0.5
    assert figure_of(record, "ledger.sent", 2) == 30
    assert figure_of(record, "ledger.sent (10 down)", 2) == 120
    assert figure_of(record, "ledger.sent (ten down)", 2) is None
    assert figure_of(record, "ledger.server_flops_per_round", 2) == 2
    assert figure_of(record, "unknown", 2) is None
    assert figure_of(record, "diagnostics.cosine", 2) is None
    assert figure_of(record | {"diagnostics": {"cosine": 0.9}}, "diagnostics.cosine", 2) == 0.9


def test_one_metric_beside_another(tmp_path: Path) -> None:
    """Loss is 1 − accuracy there: 0.4 beside 0.6, and the evidence says which is which."""
    claim = 'text = "c"\nnear = ["A"]\nof = ["A"]\nby = 0.3\nmetric = "loss"\nof_metric = "accuracy"'
    definition = load(str(tiny(tmp_path, f"{HEAD}\n[[claims]]\n{claim}")))
    found = judge(definition, made_up(definition, {"A": [0.6] * 3, "B": [0.5] * 3}))[0]
    assert found["verdict"] == "holds"
    assert "A (loss) from A (accuracy) by 0.200" in evidence(definition, found)


def test_evidence_counts_what_holds_what_holds_partly_and_what_was_not_tried(tmp_path: Path) -> None:
    claim = '[[claims]]\ntext = "c"\nahead = ["A"]\nof = [0.1, 0.59, 0.9, "B"]'
    definition = load(str(tiny(tmp_path, f"{HEAD}\n{claim}")))
    stored = made_up(definition, {"A": [0.6, 0.62, 0.58], "B": [0.5] * 3})
    for key in [key for key in stored.runs if key.label == "B"]:
        del stored.runs[key]
    told = evidence(definition, judge(definition, stored)[0])
    assert told.startswith("1 of 4 comparisons hold, 1 partly, 1 not tried; least: A ahead of 0.900 by −0.300")
