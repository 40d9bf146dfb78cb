"""The table of regrets in the docs follows from what was measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def regret() -> Any:
    spec = importlib.util.spec_from_file_location("regret", ROOT / "benchmarks" / "regret.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["regret"] = module
    spec.loader.exec_module(module)
    return module


def row(**more: Any) -> dict[str, Any]:
    methods = {"fedavg": [0.5, 0.7], "parallel": [0.8, 0.9], "center": "it diverged"}
    first = [{"algorithm": "fedavg", "settings": {}}]
    plain = {"task": "t", "packaged": True, "seen": False, "rounds": 3, "metric": "accuracy"}
    return plain | {"methods": methods, "advice": first, "advised": [0.5, 0.7]} | more


def test_the_page_has_the_table_of_the_stored_results(regret: Any) -> None:
    page = (ROOT / "docs" / "choosing.md").read_text()
    shown = page.partition("<!-- regret -->")[2].partition("<!-- /regret -->")[0]
    assert shown.strip() == regret.table(regret.load(regret.RESULTS)).strip()


def test_every_stored_task_is_one_that_the_script_measures(regret: Any) -> None:
    known = {task.name: task for task in regret.TASKS}
    for stored in regret.load(regret.RESULTS):
        task = known[stored["task"]]
        assert (task.rounds, task.minutes, list(task.settings)) == tuple(
            stored[key] for key in ("rounds", "minutes", "settings")
        )


def test_regret_is_the_best_mean_minus_that_of_the_advice(regret: Any) -> None:
    assert regret.regret(row()) == pytest.approx(25)  # 0.85 - 0.60
    assert regret.regret(row(metric="loss")) == pytest.approx(0)  # the smallest loss is the best
    assert regret.regret(row(advised="it diverged")) == float("inf")
