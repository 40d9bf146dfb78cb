"""Mistakes on the command line and in recipes."""

from __future__ import annotations

from .table import Mistake, commanded

RUN = ("run", "digits", "--rounds", "1")

MISTAKES = [
    Mistake("`--set client.lr=0.1`", commanded(*RUN, "--set", "client.lr=0.1")),
    Mistake("`--set client.steps=5 --set client.epochs=1`", commanded(*RUN, "--set", "client.epochs=1")),
    Mistake("`mixfed run digts`", commanded("run", "digts")),
    Mistake("`--algorithm fedavgg`", commanded(*RUN, "--algorithm", "fedavgg")),
    Mistake("`--device cuda:7`", commanded(*RUN, "--device", "cuda:7")),
]
