"""Delays are functions of (seed, round, client); who is asked follows from who is busy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mixfed.backends.clock import VirtualClock
from mixfed.core.backend import Run
from mixfed.core.delays import Dropouts, HalfNormal, LogNormal, Scripted, SpeedClasses, Trace, none
from mixfed.core.jobs import JobBook
from mixfed.core.ledger import Ledger
from mixfed.core.schedule import Schedule, sample_cohort
from mixfed.errors import InputError
from tests.core.helpers import averaging
from tests.problems import small_mlp

MANY = np.arange(20_000)


def test_half_normal_has_its_mean_and_spread() -> None:
    found = HalfNormal(20.0)(0, 3, "clients", MANY)
    assert (found >= 0).all()
    assert found.mean() == pytest.approx(20 * np.sqrt(2 / np.pi), rel=0.02)
    assert np.sqrt((found**2).mean()) == pytest.approx(20, rel=0.02)


def test_log_normal_is_in_rounds_of_so_many_seconds() -> None:
    found = LogNormal(60.0, 0.5, seconds_per_round=30.0)(0, 0, "clients", MANY)
    assert np.median(found) == pytest.approx(2.0, rel=0.02)
    assert np.log(found).std() == pytest.approx(0.5, rel=0.02)


def test_a_delay_does_not_depend_on_who_else_is_asked() -> None:
    delay = Dropouts(SpeedClasses(HalfNormal(5.0), [1.0, 3.0]), 0.2)
    together = delay(1, 7, "clients", np.array([2, 5, 9]))
    alone = [delay(1, 7, "clients", np.array([c]))[0] for c in (2, 5, 9)]
    assert together.tolist() == alone
    assert delay(1, 8, "clients", MANY[:50]).tolist() != delay(1, 7, "clients", MANY[:50]).tolist()
    assert delay(2, 7, "clients", MANY[:50]).tolist() != delay(1, 7, "clients", MANY[:50]).tolist()


def test_a_client_stays_in_its_speed_class() -> None:
    delay = SpeedClasses(Scripted({}, otherwise=1.0), [1.0, 4.0], shares=[3, 1])
    first, second = delay(0, 0, "clients", MANY), delay(0, 9, "clients", MANY)
    assert first.tolist() == second.tolist()
    assert set(first) == {1.0, 4.0}
    assert (first == 4.0).mean() == pytest.approx(0.25, abs=0.02)


def test_dropouts_never_report() -> None:
    found = Dropouts(none, 0.3)(0, 0, "clients", MANY)
    assert np.isinf(found).mean() == pytest.approx(0.3, abs=0.02)


def test_a_trace_is_drawn_from_and_a_client_keeps_to_its_own_lines(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("client,delay\n4,1.5\n4,2.5\n,7\n,8\n")
    delay = Trace(str(file))
    assert {float(delay(0, r, "clients", np.array([4]))[0]) for r in range(40)} == {1.5, 2.5}
    assert set(delay(0, 0, "clients", np.arange(5, 60))) == {7.0, 8.0}


def test_bad_settings_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("delay\n")
    (tmp_path / "words.csv").write_text("delay\nsoon\n")
    (tmp_path / "names.csv").write_text("client,delay\nAda,3\n")
    with pytest.raises(InputError, match="'client'"):
        Trace(str(tmp_path / "names.csv"))
    for wrong in (
        lambda: HalfNormal(-1.0),
        lambda: LogNormal(0.0, 1.0),
        lambda: SpeedClasses(none, [1.0], shares=[1, 2]),
        lambda: SpeedClasses(none, [1.0, 2.0], shares=[0, 0]),
        lambda: Dropouts(none, 1.5),
        lambda: Trace(str(tmp_path / "none.csv")),
        lambda: Trace(str(tmp_path / "empty.csv")),
        lambda: Trace(str(tmp_path / "words.csv")),
        lambda: Schedule(3, buffer=-1),
        lambda: Schedule(3, late="maybe"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError):
            wrong()


@pytest.mark.parametrize("population", [60, 10_000])
def test_busy_clients_are_never_sampled(population: int) -> None:
    busy = set(range(0, 40, 2))
    counts = np.zeros(population)
    for number in range(300):
        chosen = sample_cohort(5, number, "clients", population, 10, busy)
        assert len(set(chosen.tolist())) == 10
        assert not busy & set(chosen.tolist())
        counts[chosen] += 1
    free = np.setdiff1d(np.arange(population), list(busy))
    assert counts[free].sum() == 3000
    assert counts[free].max() <= 110 if population == 60 else counts[free].max() < 6


def test_where_too_few_are_free_all_of_them_are_asked() -> None:
    assert sample_cohort(0, 0, "clients", 6, 5, {0, 2, 3}).tolist() == [1, 4, 5]
    assert sample_cohort(0, 0, "clients", 2, 1, {0, 1}).tolist() == []


def clock_of(schedule: Schedule) -> tuple[VirtualClock, JobBook]:
    book = JobBook("clients")
    run = Run(averaging(small_mlp()), {}, {}, schedule, 0, Ledger(), {"clients": book})
    return VirtualClock(run), book


def heard(clock: VirtualClock, book: JobBook, until: float, enough: int = 99) -> float:
    reports = clock.wait(until, enough)
    for numbers, times in reports.jobs.values():
        book.mark(numbers, times)
    return reports.now


def test_reports_come_by_time_and_then_in_the_order_of_asking() -> None:
    schedule = Schedule(3, delays=Scripted({(0, 1): 2.5, (0, 2): 1.0, (0, 5): 1.0, (1, 7): 0.0}))
    clock, book = clock_of(schedule)
    clock.sent(book.add(np.array([1, 2, 5]), 0, 0, 0.0))
    heard(clock, book, 0.9)
    assert len(book.reported(99.0)) == 0
    clock.sent(book.add(np.array([7]), 1, 0, 1.0))
    assert heard(clock, book, 2.0) == 2.0
    jobs = book.reported(99.0)
    assert jobs.clients.tolist() == [2, 5, 7]
    book.take(jobs)
    assert heard(clock, book, 9.0, enough=1) == 2.5
    assert book.reported(99.0).clients.tolist() == [1]
    book.take(book.reported(99.0))
    assert len(book) == 0
    assert book.rounds() == {0, 1}  # until the round ends, because they are to be collected
    book.end_round()
    assert book.rounds() == set()


def test_the_clock_is_found_again_from_the_book() -> None:
    schedule = Schedule(3, delays=HalfNormal(3.0))
    clock, book = clock_of(schedule)
    clock.sent(book.add(np.arange(4), 0, 0, 0.0))
    clock.sent(book.add(np.arange(4, 8), 1, 0, 1.0))
    heard(clock, book, 2.0)
    again = JobBook("clients")
    again.restore(book.tree())
    other = VirtualClock(Run(averaging(small_mlp()), {}, {}, schedule, 0, Ledger(), {"clients": again}))
    heard(clock, book, 50.0)
    heard(other, again, 50.0)
    assert again.reported(99.0).clients.tolist() == book.reported(99.0).clients.tolist()
    assert len(book.reported(99.0)) == 8


def test_a_client_that_is_given_up_is_free_again() -> None:
    clock, book = clock_of(Schedule(1, delays=Scripted({(0, 3): np.inf, (0, 4): 5.0}), patience=2))
    clock.sent(book.add(np.array([3, 4]), 0, 0, 0.0))
    heard(clock, book, 1.0)
    assert len(book.give_up(2.0, 1.0)) == 0
    heard(clock, book, 2.0)
    lost = book.give_up(2.0, 2.0)
    assert lost.clients.tolist() == [3, 4]
    clock.forget(lost)
    assert clock.wait(np.inf, 1).over
    assert len(book) == 0
