"""What the commands do can be called from Python: the same functions, with a watch of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from mixfed.core.loop import Result
from mixfed.errors import InputError
from mixfed.experiments.compare import compare
from mixfed.experiments.ownership import holdings
from mixfed.experiments.probing import probe
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.study import load, run_study
from mixfed.experiments.tune import tune
from mixfed.experiments.watch import Interrupted, Moved, Watch

from .test_summaries import study

SMALL = ["data.partition.clients=10", "cohort=3", "rounds=3", "evaluate.every=1", "simulator.executor=loop"]


class Seen:
    """Writes down what it is told, and asks to stop after so many rounds."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.begun: list[tuple[str, int]] = []
        self.rounds: list[int] = []
        self.results: list[Result] = []
        self.stop_after = stop_after

    def begin(self, title: str, rounds: int) -> Moved:
        self.begun.append((title, rounds))

        def moved(done: int, metrics: Mapping[str, float]) -> None:
            self.rounds.append(done)

        return moved

    def watch(self) -> Watch:
        return Watch(self.begin, self.results.append, lambda: len(self.rounds) >= self.stop_after)


def test_a_comparison_is_watched_interrupted_and_taken_up_again(tmp_path: Path) -> None:
    recipes = Request("digits", SMALL).recipes(["fedavg", "fedprox"], [0, 1])
    assert [(r.algorithm, r.seed) for r in recipes] == [("fedavg", 0), ("fedprox", 0), ("fedavg", 1), ("fedprox", 1)]
    seen = Seen(stop_after=4)
    with pytest.raises(Interrupted, match=r"round \d of 3 of fedprox, seed 0"):
        compare(recipes, tmp_path / "out", watch=seen.watch())
    assert len(seen.results) == 1
    with pytest.raises(InputError, match="already holds"):
        compare(recipes, tmp_path / "out")
    rest = Seen()
    found = compare(recipes, tmp_path / "out", resume=True, watch=rest.watch())
    assert rest.begun == [("fedprox · seed 0", 3), ("fedavg · seed 1", 3), ("fedprox · seed 1", 3)]
    assert found == json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert found["algorithms"] == compare(recipes, tmp_path / "straight")["algorithms"]
    with pytest.raises(InputError, match="differ in algorithm or seed"):
        compare([recipes[0], recipes[0]], tmp_path / "twice")


def test_algorithms_with_data_of_their_own_get_them(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('base = "digits"\n[for.fedprox.data]\nvalidation = 0.5\n')
    recipes = Request(str(recipe), SMALL).recipes(["fedavg", "fedprox"], [0])
    found = compare(recipes, tmp_path / "both")["algorithms"]["fedprox"]
    assert found == compare(recipes[1:], tmp_path / "alone")["algorithms"]["fedprox"]


def test_a_study_and_a_tuning(tmp_path: Path) -> None:
    chosen = load(str(study(tmp_path)))
    seen = Seen()
    found = run_study(Request(chosen.recipe, SMALL), chosen, [0], tmp_path / "study", seen.watch())
    assert list(found["points"]) == ["small", "large"]
    assert seen.begun == [("fedavg · seed 0", 3)] * 2
    request = Request("digits", [*SMALL, "data.validation=0.2"])
    tuned, out = tune(request, ["fedavg"], ["client.learning_rate=0.001,0.1"], [0], tmp_path / "tuning")
    assert tuned["algorithms"]["fedavg"]["best"]["settings"] == {"client.learning_rate": 0.1}
    assert json.loads((out / "tuning.json").read_text()) == tuned
    again = Request("digits", SMALL, tuned=out / "tuned.toml").recipes(["fedavg"], [0])
    assert again[0].client.learning_rate == 0.1


def test_a_probe_and_who_holds_what() -> None:
    recipe = Request("digits", SMALL).recipes(["fedavg"], [0])[0]
    seen = Seen()
    found, advice = probe(recipe, rounds=3, repeats=2, watch=seen.watch())
    assert seen.begun == [("probe", 6)]
    assert seen.rounds == [1, 2, 3, 4, 5, 6]
    assert found.measured["G2"].shape == (2, 3)
    assert advice.reasons
    with pytest.raises(Interrupted, match="2 of 6 rounds of the probe"):
        probe(recipe, rounds=3, repeats=2, watch=Seen(stop_after=2).watch())
    held = holdings(build_scenario(recipe))
    assert list(held) == ["10 clients", "centre", "test"]
    assert set(held["10 clients"].labels) == set("01234")
    assert all(sum(holding.labels.values()) == holding.examples for holding in held.values())
