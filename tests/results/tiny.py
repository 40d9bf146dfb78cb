"""An experiment of embedded data that takes seconds, and what is stored of runs that nobody made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mixfed.experiments.reproduce.definition import Definition, load
from mixfed.experiments.reproduce.judge import judge
from mixfed.experiments.reproduce.plan import plan
from mixfed.experiments.reproduce.runs import order_of
from mixfed.experiments.reproduce.store import Store, Stored, columns

TINY = """
title = "Digits in a few rounds"
recipe = "digits"
metric = "accuracy"
rounds = 4
seeds = [0, 1]
seconds = 2
set = ["evaluate.every=2", "evaluate.sets=['all']"]

[[cells]]
label = "slow"
set = ["client.learning_rate=0.01"]

[[cells]]
label = "fast"
set = ["client.learning_rate=0.1"]

[[runs]]
label = "FedAvg"
algorithm = "fedavg"
paper = {"accuracy @ fast" = 0.5}

[[runs]]
label = "Oracle"
algorithm = "oracle"

[[claims]]
text = "The oracle is ahead"
ahead = ["Oracle"]
of = ["FedAvg"]
"""


def tiny(folder: Path, text: str = TINY, name: str = "tiny") -> Path:
    """The file of an experiment."""
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def made_up(
    definition: Definition, figures: dict[str, list[float]], chosen: dict[str, dict[str, Any]] | None = None
) -> Stored:
    """Runs with these accuracies by label (in every cell alike), a value for each seed."""
    stored = Stored(definition.name)
    for run in plan(definition, chosen or {}):
        seeds = run.method.seeds or definition.seeds
        value = figures[run.key.label][seeds.index(run.key.seed)]
        record = {
            **run.key._asdict(),
            **{"command": run.command(), "fingerprint": run.fingerprint(), "executor": "loop", "seconds": 1.5},
            **{"rounds": 2, "ledger": {"bytes_down": 4000, "bytes_up": 4000}},
            "metrics": columns([{"round": 1, "loss": 2.0, "accuracy": value / 2}, _entry(value)]),
        }
        stored = stored.with_run(record, {"torch": "2.13.0"})
    return stored


def _entry(value: float) -> dict[str, Any]:
    return {"round": 2, "loss": 1.0 - value, "accuracy": value}


def write(store: Store, path: Path, figures: dict[str, list[float]]) -> Definition:
    """Stores runs with these accuracies."""
    from dataclasses import replace

    definition = load(str(path))
    stored = made_up(definition, figures)
    stored = replace(stored, claims=judge(definition, stored))
    store.update(definition.name, lambda before: stored, order_of(definition))
    return definition
