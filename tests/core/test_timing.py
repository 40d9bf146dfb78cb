"""``auto`` spends little of a run's time on choosing, and chooses again when it was mistaken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mixfed.backends.run import run
from mixfed.backends.simulator import choice, timing
from mixfed.backends.simulator.choice import Chooser
from mixfed.backends.simulator.engine import Simulator
from mixfed.backends.simulator.execution import WHOLE, Execution, Record
from mixfed.backends.simulator.executors import Cohort
from mixfed.backends.simulator.timing import AGAIN, FIRST, Race, Trial, Watch
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.loop import Result
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.errors import InputError
from mixfed.models.networks import mlp
from tests.core.helpers import assert_equal, averaging, clients, train

LOOP, VMAP, FACTORED = Execution("loop", 0, 1), Execution("vmap", WHOLE, 1), Execution("factored", WHOLE, 1)
THEN = "vmap chunk=1073741824 threads=1 cores=1; from 3 on loop chunk=0 threads=1 cores=1"


class Machine:
    """Clients that take so many seconds each, after so many for a chunk of them; vmap may fail."""

    def __init__(self, each: dict[Execution, float], chunk: float = 0.0, fails: tuple[Execution, ...] = ()) -> None:
        self.each, self.chunk, self.fails, self.now = each, chunk, fails, 0.0
        self.refused: list[Execution] = []

    def whole(self, how: Execution, count: int) -> float:
        return self.each[how] * count + (self.chunk if how.chunk else 0.0)

    def attempt(self, how: Execution, count: int) -> None:
        self.now += self.whole(how, count)
        if how in self.fails:
            raise InputError("no")

    def race(self, count: int, work: float, **again: Any) -> Race:
        trial = Trial(np.ones(count, np.int64), lambda how: count if how.chunk else 1)
        race = Race(
            self.attempt, trial, work, lambda how, error: self.refused.append(how), lambda how: self.whole(how, count)
        )
        race = replace(race, **again)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timing.time, "perf_counter", lambda: self.now)
            race.run(list(self.each))
        return race


def test_the_fastest_is_found_and_what_is_hopeless_or_fails_is_hardly_tried() -> None:
    machine = Machine({FACTORED: 0.01, VMAP: 0.004, LOOP: 0.5}, fails=(FACTORED,))
    race = machine.race(100, 1e6)
    assert race.fastest == VMAP
    assert machine.refused == [FACTORED]
    assert LOOP not in race.seconds
    assert machine.now == pytest.approx(2 * 0.01 + (2 + 200) * 0.004 + 4 * 0.5)
    assert "4.00 ms by vmap (a chunk for every thread, 1 thread)" in race.told()


@given(
    paces=st.lists(st.floats(1e-4, 1e-2), min_size=3, max_size=3),
    chunk=st.floats(0, 1e-2),
    count=st.integers(2, 200),
    rounds=st.integers(1, 5000),
)
def test_the_share_is_kept(paces: list[float], chunk: float, count: int, rounds: int) -> None:
    """Of the time that the run takes by the first execution, which is the most promising one."""
    machine = Machine(dict(zip([FACTORED, VMAP, LOOP], paces, strict=True)), chunk)
    race = machine.race(count, rounds * count)
    if not race.seconds:
        assert race.spent == 0
        assert rounds < 3 / FIRST
        return
    assert race.spent <= FIRST * rounds * machine.whole(FACTORED, count) * (1 + 1e-9)
    again = machine.race(count, rounds * count, share=AGAIN, pace=race.pace)
    assert again.spent <= AGAIN * rounds * machine.whole(FACTORED, count) * (1 + 1e-9)


def test_where_the_first_is_the_best_the_share_is_one_of_the_time_that_the_run_takes() -> None:
    machine = Machine({FACTORED: 0.0002, VMAP: 0.0017, LOOP: 0.0015}, chunk=0.0004)
    race = machine.race(10, 500 * 10)
    assert race.fastest == FACTORED
    assert race.spent <= FIRST * 500 * race.best


def test_a_race_is_run_again_for_a_share_of_the_time_that_was_observed() -> None:
    """As after a surprise, when the pace of the run is known before anything is timed."""
    machine = Machine({VMAP: 0.01, LOOP: 0.002})
    race = machine.race(10, 500 * 10, share=AGAIN, pace=0.01)
    assert race.fastest == LOOP
    assert set(race.seconds) == {VMAP, LOOP}
    assert machine.race(10, 500 * 10, share=AGAIN, pace=0.01, spent=AGAIN * 500 * 10 * 0.01).seconds == {}


def test_a_few_clients_tell_what_clients_of_many_steps_will_take() -> None:
    """Of 20 clients with 1 to 40 steps the first two have one each, and under vmap all wait for the longest."""
    steps = np.array([1, 1] + [40, 4, 4] * 6)
    now = 0.0

    def attempt(how: Execution, count: int) -> None:
        nonlocal now
        now += 0.001 * (steps[:count].sum() if how == LOOP else steps[:count].max() * (1 + count))

    race = Race(
        attempt, Trial(steps, lambda how: 20 if how.chunk else 1), 1e6, lambda how, error: None, lambda how: 1.0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing.time, "perf_counter", lambda: now)
        race.run([LOOP, VMAP])
    assert race.fastest == LOOP
    assert VMAP not in race.seconds  # two and eight of its clients told that all would wait for the longest
    assert now == pytest.approx(0.001 * (2 * 3 + 40 * 9 + 2 + 2 * steps.sum()))


def test_a_run_that_is_too_short_times_nothing() -> None:
    told: list[str] = []
    train(averaging(Model(mlp(3, 2), cross_entropy)), clients([4] * 8), "auto", rounds=5, say=told.append)
    assert told == ["Executor: vmap (a chunk for every thread, 1 thread); the run is too short to time others."]


@pytest.mark.parametrize(
    ("sizes", "width", "first"),
    [([8] * 20, 8, "vmap"), ([4] * 19 + [800], 8, "loop"), ([8] * 20, 600, "factored")],
    ids=["alike and small", "one is long", "wide"],
)
def test_the_most_promising_execution_follows_from_shapes(sizes: list[int], width: int, first: str) -> None:
    told: list[str] = []
    network = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    algorithm = averaging(Model(network, cross_entropy))
    train(algorithm, clients(sizes), "auto", rounds=4, say=told.append)
    assert told[0].startswith(f"Executor: {first} ")


@pytest.mark.parametrize(("took", "surprised"), [(1.2, False), (0.8, False), (1.6, True), (0.6, True)])
def test_only_times_that_stay_away_from_what_was_measured_are_a_surprise(took: float, surprised: bool) -> None:
    watch = Watch(expected=1.0)
    for seconds in [9.0, 1.0, 9.0, 9.0, 9.0, *[max(took, 9.0)] * 4]:
        watch.saw(seconds)
    assert not watch.surprised
    watch.saw(took)
    assert watch.surprised == surprised


def test_where_nothing_was_measured_the_first_cohorts_tell_what_to_expect() -> None:
    watch = Watch()
    for seconds in [1.0] * 5 + [1.1] * 5:
        watch.saw(seconds)
    assert (watch.expected, watch.surprised) == (1.0, False)


def test_a_record_of_executions_is_read_as_it_was_written() -> None:
    record = Record(VMAP).then(3, LOOP).then(7, FACTORED)
    assert Record.parsed(record.text()) == record
    assert [record.at(round) for round in (0, 2, 3, 6, 7, 99)] == [VMAP, VMAP, LOOP, LOOP, FACTORED, FACTORED]
    for wrong in (f"{VMAP.text()}; from x on {LOOP.text()}", f"{record.text()}; from 7 on {LOOP.text()}"):
        with pytest.raises(InputError, match="leave it out"):
            Record.parsed(wrong)


class Branching(nn.Module):
    """A network with the parameters of ``nn.Linear(3, 2)`` that looks at its inputs, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Linear(3, 2).parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x if bool(x.sum() > 0) else -x, self.weight, self.bias)


def test_what_was_chosen_for_one_network_is_not_taken_for_another_of_the_same_shapes() -> None:
    """Both runs are too short to time anything, so that the most promising one that works is taken."""
    data, found = clients([4] * 8), {}
    for network in (nn.Linear(3, 2), Branching()):
        simulator = Simulator("auto", threads=1)
        run(averaging(Model(network, cross_entropy)), data, rounds=20, cohort=8, backend=simulator)
        found[type(network)] = simulator.chooser.chosen()["clients"].split()[0]
    assert found == {nn.Linear: "vmap", Branching: "loop"}


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> list[Execution]:
    """A machine on which vmap seems to be the fastest at first, and loop from then on; the winners so far."""
    winners: list[Execution] = []

    def run(race: Race, candidates: list[Execution]) -> None:
        winners.append(VMAP if not winners else LOOP)
        race.seconds, race.pace = {winners[-1]: 1.0}, 1e9 if len(winners) == 1 else None

    monkeypatch.setattr(Race, "run", run)
    monkeypatch.setattr(timing, "WINDOW", 2)
    return winners


def go(path: Path | None = None, rounds: int = 6, **options: Any) -> tuple[Result, Simulator, list[str]]:
    told: list[str] = []
    torch.manual_seed(0)
    how = {"checkpoints": Checkpoints(path, every=2), "resume": True} if path else {}
    simulator = Simulator("auto", threads=1, say=told.append, **options)
    algorithm = averaging(Model(mlp(3, 2), cross_entropy))
    return run(algorithm, clients([4] * 8), rounds=rounds, cohort=8, backend=simulator, **how), simulator, told


def test_a_choice_that_was_a_mistake_is_made_again_and_recorded(mistaken: list[Execution], tmp_path: Path) -> None:
    recorded: list[str] = []
    first, simulator, told = go(chose=lambda source, text: recorded.append(text))
    assert mistaken == [VMAP, LOOP]
    assert simulator.chooser.chosen() == {"clients": THEN}
    assert recorded == [VMAP.text(), THEN]
    assert told[1].startswith("Executor: loop (one client at a time, 1 thread) from the next round on, because vmap")

    again, simulator, told = go(chosen={"clients": THEN})
    assert_equal(first.params, again.params)
    assert simulator.chooser.chosen() == {"clients": THEN}
    assert len(told) == 1

    go(tmp_path, rounds=2, chosen={"clients": THEN})  # killed after the checkpoint of round 2, and the new choice
    resumed, _, _ = go(tmp_path, chosen={"clients": THEN})
    assert_equal(first.params, resumed.params)


def test_a_checkpoint_holds_when_the_choice_changed(mistaken: list[Execution], tmp_path: Path) -> None:
    whole, _, _ = go()
    mistaken.clear()
    _, simulator, _ = go(tmp_path, rounds=4)
    assert simulator.chooser.chosen() == {"clients": THEN}
    resumed, simulator, _ = go(tmp_path)
    assert simulator.chooser.chosen() == {"clients": THEN}
    assert_equal(whole.params, resumed.params)


def test_executions_are_timed_again_after_a_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the clock is made up: vmap is faster until the sixth cohort, and much slower from then on."""
    now, cohorts = 0.0, 0

    def seconds(cohort: Cohort) -> float:
        late = 1.0 if cohort.how.chunk and cohorts > 5 else 0.0
        return {"loop": 0.01, "vmap": 0.002}[cohort.how.name] * len(cohort.plan) + late

    def attempted(algorithm: Any, them: list[Cohort], *others: Any) -> None:
        nonlocal now
        now += seconds(them[0])

    def took(chooser: Chooser, cohort: Cohort, measured: float) -> None:
        nonlocal cohorts
        cohorts += 1
        heard(chooser, cohort, seconds(cohort))

    heard = Chooser.took
    monkeypatch.setattr(choice, "execute", attempted)
    monkeypatch.setattr(Chooser, "took", took)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    _, simulator, told = go(rounds=400)
    first, later = simulator.chooser.chosen()["clients"].split("; ")
    assert first.startswith("vmap")
    assert later.startswith("from 11 on loop")
    assert len(told) == 2
