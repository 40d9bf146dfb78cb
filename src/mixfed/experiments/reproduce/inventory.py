"""Which experiments there are, what is stored of them, and how long the rest would take."""

from __future__ import annotations

from dataclasses import dataclass

from mixfed.experiments.reproduce import tuning
from mixfed.experiments.reproduce.definition import Definition, load
from mixfed.experiments.reproduce.plan import Planned
from mixfed.experiments.reproduce.runs import missing, order_of
from mixfed.experiments.reproduce.store import Store, Stored
from mixfed.experiments.texts import packaged


@dataclass(frozen=True)
class Entry:
    """An experiment: how many runs are stored and missing, and about how many seconds these would take."""

    name: str
    title: str
    stored: int
    missing: int
    seconds: float
    needs: str


def inventory(store: Store) -> list[Entry]:
    """All packaged experiments, the cheapest first."""
    found = [_entry(load(name), store) for name in packaged("reproductions")]
    return sorted(found, key=lambda entry: (bool(entry.needs), entry.seconds, entry.name))


def _entry(definition: Definition, store: Store) -> Entry:
    stored = store.read(definition.name)
    rest, total = missing(definition, stored), len(order_of(definition))
    seconds = sum(seconds_of(definition, stored, run) for run in rest)
    seconds += sum(seconds_of_tuning(definition, stored, label) for label in {run.key.label for run in rest})
    return Entry(definition.name, definition.title, total - len(rest), len(rest), seconds, definition.needs)


def seconds_of(definition: Definition, stored: Stored, run: Planned) -> float:
    """How long a run takes: as long as those of the same method took, or as the definition says."""
    took = [record["seconds"] for key, record in stored.runs.items() if key.label == run.key.label]
    return sum(took) / len(took) if took else run.method.seconds or definition.seconds


def seconds_of_tuning(definition: Definition, stored: Stored, label: str) -> float:
    """How long it takes to choose the settings of a method: its trials, as much shorter as they have fewer rounds."""
    method, how = definition.method(label), definition.tune
    if how is None or not tuning.waits(definition, method, stored):
        return 0.0
    from mixfed.experiments.request import Request

    whole = definition.rounds or Request(definition.recipe).base().get("rounds", 100)
    share = min(1.0, how.rounds / whole) if how.rounds else 1.0
    return how.trials * len(how.seeds) * share * (method.seconds or definition.seconds)
