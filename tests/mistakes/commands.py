"""Mistakes on the command line and in recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .table import Mistake, commanded


def beside(name: str, make: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """A command in a folder with such a file."""

    def run() -> list[str]:
        Path(name).write_text("size,animal\n1,cat\n")
        return make()

    return run


RUN = ("run", "digits", "--rounds", "1")

MISTAKES = [
    Mistake("`--set client.lr=0.1`", commanded(*RUN, "--set", "client.lr=0.1")),
    Mistake("`--set client.steps=5 --set client.epochs=1`", commanded(*RUN, "--set", "client.epochs=1")),
    Mistake("`mixfed run digts`", commanded("run", "digts")),
    Mistake("`mixfed run all.csv`", beside("all.csv", commanded("run", "all.csv"))),
    Mistake("`--algorithm fedavgg`", commanded(*RUN, "--algorithm", "fedavgg")),
    Mistake("`--device cuda:7`", commanded(*RUN, "--device", "cuda:7")),
]
