"""The table of regrets in the docs follows from what was measured."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from mixfed.experiments.advise.advice import Advice

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
    plain = {"task": "t", "packaged": True, "seen": False, "rounds": 3, "seeds": 2, "minutes": 1, "metric": "accuracy"}
    return plain | {"methods": methods, "advice": first, "advised": [0.5, 0.7]} | more


def test_the_page_has_the_table_of_the_stored_results(regret: Any) -> None:
    page = (ROOT / "docs" / "choosing.md").read_text()
    shown = page.partition("<!-- regret -->")[2].partition("<!-- /regret -->")[0]
    assert shown.strip() == regret.table(regret.load(regret.RESULTS)).strip()


def test_every_stored_task_is_one_that_the_script_measures(regret: Any) -> None:
    known = {task.name: task for task in regret.TASKS}
    for stored in regret.load(regret.RESULTS):
        task = known[stored["task"]]
        assert (task.rounds, task.seen, list(task.settings)) == tuple(
            stored[key] for key in ("rounds", "seen", "settings")
        )
        assert min(map(len, [stored["advised"], stored["methods"][regret.best(stored)[0]]])) == stored["seeds"]


def test_regret_is_the_best_mean_minus_that_of_the_advice(regret: Any) -> None:
    assert regret.regret(row()) == pytest.approx(25)  # 0.85 - 0.60
    assert regret.regret(row(metric="loss")) == pytest.approx(0)  # the smallest loss is the best
    assert regret.regret(row(advised="it diverged")) == float("inf")


def test_only_methods_with_all_seeds_are_the_best_of_all(regret: Any) -> None:
    """One lucky run is not compared with the mean of two."""
    lucky = row()["methods"] | {"hfcl": [0.99]}
    assert regret.best(row(methods=lucky)) == ("parallel", pytest.approx(0.85))


def test_the_error_of_a_regret_is_that_of_differences_seed_by_seed(regret: Any) -> None:
    """0.3 and 0.2 are lost: 25 points, standard deviation 7.07, divided by √2."""
    assert regret.error(row()) == pytest.approx(5)
    assert regret.error(row(advised=[0.7, 0.8])) == pytest.approx(0)
    assert "25.0 ± 5.0" in regret.table([row()])


def test_seeds_are_added_until_a_regret_is_known_well_enough(regret: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only to the advice and to what is ahead of it: the third seed of the best method is like that of the advice."""
    figures = {"fedavg": [0.5, 0.7, 0.6], "parallel": [0.8, 0.6, 0.7], "center": [0.1, 0.1]}
    trained = []

    def train(request: Any, metric: str, scenarios: Any, name: str, seeds: int, had: Any, settings: Any) -> Any:
        trained.append((name, seeds))
        return figures[name][:seeds] if name in figures else "it diverged"

    told = {"minutes": 1, "metric": "accuracy", "advice": row()["advice"], "trials": [], "time": "", "seconds": {}}
    monkeypatch.setattr(regret, "_ask", lambda request, task: told)
    monkeypatch.setattr(regret, "_figures", train)
    monkeypatch.setattr(regret, "PRECISE", 12)  # points: 20 after two seeds, 11.5 after three
    found = regret.measure(regret.Task("digits", 2), "digits", None, {})
    assert (found["seeds"], found["advised"]) == (3, [0.5, 0.7, 0.6])
    assert [name for name, seeds in trained if seeds == 3] == ["parallel", "fedavg"]
    assert regret.is_complete(regret.Task("digits", 2), found)
    assert not regret.is_complete(regret.Task("digits", 2), found | {"seeds": 2})


def test_known_figures_are_reused_and_the_advice_is_asked_for_anew(
    regret: Any,
) -> None:
    """Of a method that is known nothing is trained; of the best with fewer seeds than wanted, the missing ones."""
    task = regret.Task("digits", 2, minutes=0.02)
    names = [name for name, entry in regret.ALGORITHMS.items() if not entry.oracle]
    known = {"rounds": 2, "settings": [], "metric": "accuracy", "methods": {name: [0.125] * 10 for name in names}}
    found = regret.measure(task, "digits", None, known)
    assert all(found["methods"][name] == [0.125] * 10 for name in names)
    assert found["trials"]
    assert all(len(trial) == 6 for trial in found["trials"])
    other = regret.measure(task, "digits", None, known | {"rounds": 3, "methods": {"fedavg": [0.125]}})
    assert other["methods"]["fedavg"][0] != 0.125


def test_advice_that_asks_for_more_minutes_gets_them_once(regret: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer counts, also if it asks for still more; nobody waits for more than ten minutes."""
    given = []

    def advise(request: Any, minutes: float, clock: Any) -> Advice:
        given.append(minutes)
        entry = {"algorithm": f"advised in {minutes}", "settings": {}}
        return Advice([entry], {}, [], [], "accuracy", "", minutes=4 * minutes)

    monkeypatch.setattr(regret, "advise", advise)
    found = regret._ask(None, regret.Task("t", 2, minutes=2))
    assert given == [2, 8]
    assert (found["minutes"], found["advice"][0]["algorithm"]) == (8, "advised in 8")
    regret._ask(None, regret.Task("t", 2, minutes=5))
    assert given[2:] == [5, 10]


def test_missing_seeds_are_trained_and_the_advice_is_not_asked_for_again(
    regret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name, entry in regret.ALGORITHMS.items() if not entry.oracle]
    told = {"minutes": 1, "trials": [], "time": "", "metric": "accuracy", "seconds": {"advice": 1, "all": 2}}
    advice = [{"algorithm": "center", "settings": {"central.learning_rate": 0.01}}]
    monkeypatch.setattr(regret, "PRECISE", math.inf)
    known = row(task="digits", rounds=2, seeds=1, settings=[], methods={name: [0.125] for name in names}) | told
    monkeypatch.setattr(regret, "advise", None)
    found = regret.measure(
        regret.Task("digits", 2, seeds=2), "digits", None, known | {"advice": advice, "advised": [1]}
    )
    assert found["advice"] == advice
    assert found["advised"][0] == 1
    assert len(found["advised"]) == found["seeds"] == 2
    assert sum(len(figures) == 2 for figures in found["methods"].values()) == regret.BEST
