"""``mixfed advise``: what is tried, ruled out and advised, and what it never looks at."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import mixfed as mf
from mixfed.algorithms.registry import ALGORITHMS
from mixfed.data.scenario import Scenario
from mixfed.experiments.advise import look
from mixfed.experiments.advise.advice import _repeated, _time_told
from mixfed.experiments.advise.learning import nothing_learnt
from mixfed.experiments.advise.look import look_at, with_validation
from mixfed.experiments.advise.trials import Field, Trial, affordable_rounds
from mixfed.experiments.build import build
from mixfed.experiments.report.probe import predicted_right
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario

from .tools import TINY, last_json, mixfed, refused


def test_digits_of_which_half_are_at_the_centre(tmp_path: Path) -> None:
    """The methods that mix learn all ten digits; those of clients or centre alone, and Feddle, cannot."""
    command = ["advise", "digits", "--rounds", "16", *TINY, "--executor", "loop", "--minutes", "0.4", "--json"]
    done = mixfed(*command, "--out", tmp_path / "out")
    found = last_json(done)
    assert set(found) == {"advice", "ruled_out"}
    assert 1 <= len(found["advice"]) <= 3
    mixing = {"parallel", "example_transfer", "gradient_1way", "gradient_2way", "fed_ft"}
    assert {entry["algorithm"] for entry in found["advice"]} <= mixing
    assert all(set(entry) == {"algorithm", "settings", "why"} for entry in found["advice"])
    assert "only the centre has" in found["ruled_out"]["feddle"]
    assert "never sees the labels 5, 6, 7, 8, 9" in found["ruled_out"]["fedavg"]
    assert "nobody is late" in found["ruled_out"]["fedbuff"]
    written = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert written["advice"] == found["advice"]
    followed = f"mixfed run digits --algorithm {found['advice'][0]['algorithm']} --rounds 16"
    assert followed in " ".join(done.stdout.split())


def test_objects_of_ones_own() -> None:
    """Clients hold the left half of the plane and the centre the right one; the test set is never looked at."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(600, 2)).astype(np.float32)
    y = (x[:, 1] > 0).astype(np.int64)
    left = x[:, 0] < 0
    clients = mf.FederatedData.from_arrays({"x": x[left], "y": y[left]}, np.arange(left.sum()) % 8)
    test = {"x": np.full((20, 2), 1e6, np.float32), "y": np.zeros(20, np.int64)}
    torch.manual_seed(0)
    task = mf.Task(
        nn.Linear(2, 2), clients, test, centre={"x": x[~left], "y": y[~left]}, rounds=8, cohort=4,
        client={"steps": 2}, central={"steps": 2},
    )  # fmt: skip
    found = mf.advise(task, minutes=0.05, progress=False)
    assert found.metric == "accuracy"
    assert 0 < found.trials[0]["accuracy"] < 1  # on the test set it would be all or nothing
    assert "accuracy" in found.advice[0]["why"]
    assert any("The features of clients and centre are very unlike" in sentence for sentence in found.look)


def test_a_metric_of_ones_own(tmp_path: Path) -> None:
    """CA2FL steps with ten updates, and there are eight clients: that sentence ends once."""
    code = "def right(outputs, batch):\n    return (outputs.argmax(-1) == batch['y']).float()\n"
    (tmp_path / "mine.py").write_text(code)
    settings = ["client.steps = 2", "central.steps = 2", "evaluate.metrics = ['mine.py:right']", "rounds = 8"]
    few = ["cohort = 4", "data.central.kind = 'none'", "data.partition.clients = 8", "simulator.executor = 'loop'"]
    few += ["evaluate.sets = ['all']"]
    (tmp_path / "mine.toml").write_text("\n".join(['base = "digits"', *settings, *few]))
    found = mf.advise(str(tmp_path / "mine.toml"), minutes=0.1, progress=False)
    assert found.metric.startswith("right")
    assert "buffer" in found.ruled_out["ca2fl"]
    assert not any(why.endswith(".") or f"where {name} had" in why for name, why in found.ruled_out.items())


def chances(labels: str, rate: float) -> mf.Task:
    """Points of the plane, whose labels are their side or drawn at random."""
    draw = np.random.default_rng(1)
    x = draw.normal(size=(800, 2)).astype(np.float32)
    y = (x[:, 1] > 0).astype(np.int64) if labels == "sides" else draw.integers(0, 2, 800)
    clients = mf.FederatedData.from_arrays({"x": x, "y": y}, np.arange(800) % 8)
    torch.manual_seed(0)
    how = {"steps": 5, "learning_rate": rate}
    return mf.Task(nn.Linear(2, 2), clients, {"x": x[:9], "y": y[:9]}, rounds=6, cohort=4, client=how)


def test_the_advice_says_when_no_method_has_learnt_anything() -> None:
    """No label can be told from the point, so the best of all methods is one that guessed well."""
    found = mf.advise(chances("drawn", 0.1), minutes=0.05, progress=False)
    assert found.warning.startswith("No method has learnt anything: the best accuracy, ")
    assert "is no better than always the commonest answer (" in found.warning
    assert found.warning in repr(found)
    assert found.json()["warning"] == found.warning


def test_other_figures_are_held_against_the_model_before_training() -> None:
    request = Request("digits", ["evaluate.metrics=['loss']", "evaluate.sets=['all']"])
    experiment = build(request.on(request.base(), algorithm="fedavg"))
    began = experiment.evaluate(experiment.algorithm.model.initial(), None)["loss"]
    assert f"the best loss, {began:.3f}, is no better than before training" in nothing_learnt(experiment, "loss", began)
    assert nothing_learnt(experiment, "loss", 2 * began)
    assert not nothing_learnt(experiment, "loss", 0.9 * began)


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_nothing_is_said_where_methods_learn(metric: str) -> None:
    found = mf.advise(chances("sides", 0.3), minutes=0.05, metric=metric, progress=False)
    assert not found.warning
    assert set(found.json()) == {"advice", "ruled_out"}


def test_where_every_method_is_refused_the_reason_is_told() -> None:
    draw = np.random.default_rng(1)
    fields = {"x": draw.normal(size=(80, 2)).astype(np.float32), "y": draw.normal(size=(80, 1)).astype(np.float32)}
    clients = mf.FederatedData.from_arrays(fields, np.arange(80) % 8)
    how = {"steps": 1}
    task = mf.Task(nn.Linear(2, 1), clients, fields, rounds=2, cohort=4, client=how, criterion="squared_error")
    with pytest.raises(mf.RunStopped, match="leave accuracy out of the metrics"):
        mf.advise(task, minutes=0.05, progress=False)


def test_what_is_seen_and_kept_apart() -> None:
    request = Request("digits")
    recipe = request.on(request.base())
    scenario = build_scenario(recipe)
    look = look_at(recipe, scenario)
    assert (look.only_centre, look.only_clients) == ([5, 6, 7, 8, 9], [0, 1, 2, 3, 4])
    assert not look.late
    apart = with_validation(scenario, 0)
    assert apart.validation is not None
    assert apart.central is not None
    assert scenario.central is not None
    trained = apart.clients.examples + len(apart.central)
    assert trained + len(apart.validation) == scenario.clients.examples + len(scenario.central)
    assert apart.own["validation"].examples + len(scenario.central) - len(apart.central) == len(apart.validation)


def test_a_trial_stops_at_its_evaluation_and_goes_on_from_there(tmp_path: Path) -> None:
    request = Request("lg-digits", rounds=16)
    recipe = request.on(request.base(), **{"evaluate.on": "validation", "evaluate.every": 4, "algorithm": "local"})
    field = Field(
        partial(with_validation, build_scenario(recipe)), "accuracy_local", time.monotonic() + 60, tmp_path, str
    )
    trial = Trial(recipe, {})
    field.go_on(trial, 4, 60)
    assert (trial.rounds, list(trial.scores)) == (4, [4])
    field.go_on(trial, 8, 60)
    assert (trial.rounds, list(trial.scores), trial.why_not) == (8, [4, 8], "")


def test_every_seed_is_a_run_of_its_own(tmp_path: Path) -> None:
    request = Request("digits", rounds=2)
    recipe = request.on(request.base(), **{"evaluate.every": 1, "algorithm": "center"})
    recipe = replace(recipe, evaluate=replace(recipe.evaluate, on="validation"))
    field = Field(partial(with_validation, build_scenario(recipe)), "accuracy", time.monotonic() + 60, tmp_path, str)
    trial = Trial(recipe, {})
    field.go_on(trial, 2, 60)
    for seed in (1, 2, 3, 4):
        field.again(trial, seed)
    assert len(trial.others) == 4
    assert len(set(trial.others)) > 1


class Scripted(Field):
    """A field on which methods follow given curves, each round at a given cost, by a clock of its own."""

    def __init__(self, curves: dict[str, Callable[[float], float]], costs: dict[str, float], seconds: float) -> None:
        self.now, self.curves, self.costs = 0.0, curves, costs
        super().__init__(_nothing, "accuracy", seconds, Path(), str, lambda: self.now, in_phases=("transfer",))
        recipe = Request("digits", rounds=80).on(Request("digits").base(), **{"evaluate.every": 10})
        self.trials = [Trial(replace(recipe, algorithm=name, rounds=80), {}) for name in curves]

    def go_on(self, trial: Trial, to: int, seconds: float) -> None:
        began, trial.pace = self.now, self.costs.get(trial.algorithm, 1.0)
        while trial.rounds < to and self.now - began <= seconds:
            self.now += self.costs.get(trial.algorithm, 1.0)
            trial.rounds += 1
            if trial.rounds % 10 == 0:
                trial.scores[trial.rounds] = self.curves[trial.algorithm](trial.rounds / 80) + trial.recipe.seed / 1000
        trial.seconds += self.now - began
        if not trial.scores:
            trial.why_not = "too slow to try"

    def names(self) -> list[str]:
        return [trial.algorithm for trial in self.compete(self.trials, 10, 80, ())]


def _nothing(seed: int) -> Scenario:
    raise AssertionError(f"nothing is dealt, also not with seed {seed}")


FORGETS = {"transfer": lambda x: 0.9 if x <= 0.5 else 0.3, "fedavg": lambda x: 0.5 * x, "fedadam": lambda x: x * x}


@pytest.mark.parametrize("seconds", [1000, 300, 200, 100])
def test_an_early_leader_that_forgets_is_not_advised(seconds: float) -> None:
    """With much time its end is seen, with little it is not judged."""
    field = Scripted(FORGETS, {}, seconds)
    assert field.names()[0] != "transfer"
    assert field.now <= 1.05 * seconds


def test_where_all_can_end_none_is_left_early() -> None:
    """Fedadam is the last of all until half of the rounds are over."""
    field = Scripted(FORGETS, {}, 1000)
    assert field.names() == ["fedadam", "fedavg", "transfer"]
    assert all(trial.ended for trial in field.trials)
    told, minutes = _time_told(field.trials, 1)
    assert "for all rounds in 1 minute." in told
    assert minutes == 1


def test_where_not_all_can_end_the_worst_are_left_and_told() -> None:
    field = Scripted({name: (lambda x, n=n: n / 20 + x / 10) for n, name in enumerate(ALGORITHMS)}, {}, 1000)
    best, *_ = field.names()
    assert best == list(ALGORITHMS)[-1]
    ended = [trial.algorithm for trial in field.trials if trial.ended]
    assert 2 <= len(ended) < len(ALGORITHMS)
    told, minutes = _time_told(field.trials, 1000 / 60)
    assert f"{len(ended)} of {len(ALGORITHMS)} methods were tried for all rounds" in told
    assert field.now <= 1000
    assert minutes == math.ceil(len(ALGORITHMS) * 80 / 0.6 / 60)  # every round takes a second
    assert f"About {minutes} minutes would do for all" in told


def test_a_slow_method_does_not_shorten_the_trials_of_others() -> None:
    field = Scripted(FORGETS | {"feddle": lambda x: 1.0}, {"feddle": 100.0}, 1000)
    assert field.names() == ["fedadam", "fedavg", "transfer"]
    assert not next(trial for trial in field.trials if trial.algorithm == "feddle").ended
    assert "feddle" in _time_told(field.trials, 1)[0]
    assert field.now <= 1000 + 100  # a round is never broken off


def test_what_slows_down_on_the_way_is_tried_to_the_end_where_there_is_time() -> None:
    """Of late clients little is heard in the first rounds, so that a plan by their pace is wrong."""
    field = Scripted(
        {"hfcl": lambda x: 0.8, "fed_ft": lambda x: 0.7, "feddf": lambda x: 0.1 + x, "center": lambda x: 0.5}, {}, 1000
    )
    go_on = field.go_on

    def slower(trial: Trial, to: int, seconds: float) -> None:
        field.costs[trial.algorithm] = 1.0 if trial.rounds < 10 or trial.algorithm == "center" else 2.5
        go_on(trial, to, seconds)

    field.go_on = slower  # type: ignore[method-assign]
    assert field.names() == ["feddf", "hfcl", "fed_ft", "center"]
    assert field.now <= 1000


def test_one_lucky_round_or_seed_does_not_decide() -> None:
    """The figure of a trial is the mean of its last evaluations, and of its seeds."""
    lucky = {"parallel": lambda x: 0.9 if x == 1 else 0.5, "fed_ft": lambda x: 0.8}
    field = Scripted(lucky, {}, 10_000)
    best = field.compete(field.trials, 10, 80, ())
    assert best[0].algorithm == "fed_ft"
    assert best[1].score("accuracy") == pytest.approx((0.5 + 0.9) / 2)
    ranked = _repeated(field, best)
    assert [len(trial.others) for trial in ranked] == [2, 2]  # after three seeds it is plain


def test_of_equal_figures_the_smaller_loss_is_the_better_one() -> None:
    field = Scripted(FORGETS, {}, 100)
    for trial, loss in zip(field.trials, (3.0, 2.0, 1.0), strict=True):
        trial.rounds, trial.scores, trial.loss = 80, {80: 0.25}, loss
    assert [trial.loss for trial in field.ranked(field.trials)] == [1.0, 2.0, 3.0]


def test_after_how_many_rounds_methods_are_looked_at() -> None:
    assert affordable_rounds(1e-4, 10, 60) == 15000
    assert affordable_rounds(1.0, 10, 1500) == 37
    assert affordable_rounds(100.0, 10, 60) == 1


def test_few_examples_are_judged_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "ENOUGH", 50)
    request = Request("digits")
    apart = with_validation(build_scenario(request.on(request.base())), 0)
    assert apart.validation is not None
    assert len(apart.validation) == 50
    mask = apart.like_clients["validation"]
    assert mask is not None
    assert np.array_equal(mask, apart.validation.arrays["y"] < 5)  # clients hold the digits 0 to 4


@pytest.mark.parametrize(
    ("unlike", "parallel", "transfer", "right"),
    [(True, 0.5, 0.4, True), (True, 0.4, 0.5, False), (False, 0.5, 0.52, True), (False, 0.5, 0.2, False)],
)
def test_the_verdict(unlike: bool, parallel: float, transfer: float, right: bool) -> None:
    assert predicted_right(unlike, {"parallel": parallel, "gradient_2way": transfer}) is right
    assert predicted_right(unlike, {"parallel": parallel, "gradient_2way": None}) is None


def test_what_cannot_be_advised(capsys: pytest.CaptureFixture[str]) -> None:
    assert "some minutes" in refused(capsys, "advise", "digits", "--minutes", "0")
    assert "have no metric 'auc'" in refused(capsys, "advise", "digits", "--metric", "auc")
