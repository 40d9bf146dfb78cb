"""The walk of a round leads through functions that are there, and the page on backends has all methods of one."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import getsourcefile, isfunction
from pathlib import Path

import pytest

from mixfed.core.backend import Backend

DOCS = Path(__file__).parents[1] / "docs"
STATIONS = re.findall(
    r"^\| \d+ \| `([\w/]+)\.py` \| `([\w.]+)` \|", (DOCS / "walk-of-a-round.md").read_text("utf-8"), re.M
)


@pytest.mark.parametrize(("file", "name"), STATIONS, ids=[name for _, name in STATIONS])
def test_a_station_is_there(file: str, name: str) -> None:
    module = import_module(f"mixfed.{file.replace('/', '.')}")
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    assert getsourcefile(found) == module.__file__


def test_there_are_stations_from_the_call_to_the_checkpoint() -> None:
    assert len(STATIONS) >= 20
    assert STATIONS[0][1] == "run"
    assert STATIONS[20][1] == "Checkpoints.save"


def test_a_backend_has_seven_methods_and_the_page_names_them() -> None:
    methods = [name for name, value in vars(Backend).items() if isfunction(value) and not name.startswith("_")]
    page = (DOCS / "adding-a-backend.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)\(", page, re.M) == methods
    assert len(methods) <= 7
