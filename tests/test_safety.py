"""What ``benchmarks/safety.py`` times is there: a guard that was renamed would make the benchmark fail."""

from __future__ import annotations

import runpy
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

GUARDS = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "safety.py"))["GUARDS"]


@pytest.mark.parametrize("name", [name for names in GUARDS.values() for name in names])
def test_every_guard_is_there(name: str) -> None:
    module, _, path = name.partition(":")
    assert callable(attrgetter(path)(import_module(f"mixfed.{module}")))
