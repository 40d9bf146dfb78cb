"""What ``benchmarks/ranks.py`` concludes from what it times, here on a machine that is made up."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_of_ranks", BENCHMARKS / "ranks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def machine(fixed: float, of_ranks: float) -> Callable[..., float]:
    """A round takes so many seconds, and a second for each client, and ranks take some more."""

    def rate(spec: str, seconds: float, places: list[list[int]], system: str = "mixfed") -> float:
        clients = 1 if spec == "loop" else sys.modules["workloads"].named(spec).clients
        if system == "mixfed-ranks":
            return 1 / (fixed + of_ranks + clients / len(places[0]))
        return len(places) / (fixed + clients)

    return rate


@pytest.mark.parametrize(
    ("fixed", "figures", "told"),
    [
        (1.0, ["0.05", "0.52", "1.91", "0.05", "2.00", "1.83", "0.91"], "bound by computing"),
        (2.0, ["0.05", "0.55", "1.83", "0.09", "2.00", "1.76", "0.88"], "not bound by computing"),
    ],
)
def test_half_of_the_clients_tell_what_ranks_can_gain(
    benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fixed: float,
    figures: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(benchmark, "rate", machine(fixed, of_ranks=0.5))
    monkeypatch.setattr(benchmark.os, "sched_getaffinity", lambda process: {0, 1})
    benchmark.main(["--workloads", "loop,W3", "--turns", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["loop", f"{1 / (fixed + 1):.2f}", "2.00"]
    assert lines[5].split() == ["W3", *figures]
    assert lines[8].split() == ["W3", "median", *figures, *told.split()]


def test_a_workload_is_known_by_its_size(benchmark: Any) -> None:
    named = sys.modules["workloads"].named
    half = named("W3:10")
    assert (half.clients, half.population, half.spec) == (10, 200, "W3:10")
    assert half.generate is named("W3").generate
    assert (named("W3:20").spec, named("W3:20:200").spec) == ("W3", "W3:20:200")
