"""Which runs of an experiment are wanted, and which of them are missing. Nothing here needs PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mixfed.experiments.reproduce import tuning
from mixfed.experiments.reproduce.definition import Definition, load
from mixfed.experiments.reproduce.judge import judge
from mixfed.experiments.reproduce.plan import Key, Planned, plan
from mixfed.experiments.reproduce.store import Store, Stored
from mixfed.experiments.texts import packaged


@dataclass(frozen=True)
class Wanted:
    """Which runs of an experiment are wanted; None: all."""

    labels: Sequence[str] | None = None
    cells: Sequence[str] | None = None
    seeds: Sequence[int] | None = None

    def has(self, key: Key) -> bool:
        """Whether the run is wanted."""
        of_all = ((self.labels, key.label), (self.cells, key.cell), (self.seeds, key.seed))
        return all(some is None or one in some for some, one in of_all)


def order_of(definition: Definition) -> list[Key]:
    """The runs of an experiment as its file has them: method by method."""
    keys = [run.key for run in plan(definition, {})]
    labels = [method.label for method in definition.runs]
    cells = [cell.label for cell in definition.cells]
    return sorted(keys, key=lambda key: (labels.index(key.label), cells.index(key.cell), key.seed))


def missing(definition: Definition, stored: Stored, wanted: Wanted | None = None) -> list[Planned]:
    """The runs that are not stored, or are stored with other settings than the experiment has now."""
    wanted = wanted or Wanted()
    runs = [run for run in plan(definition, stored.chosen()) if wanted.has(run.key)]
    waiting = {m.label for m in definition.runs if tuning.waits(definition, m, stored)}
    return [run for run in runs if run.key.label in waiting or not is_stored(run, stored)]


def is_stored(run: Planned, stored: Stored) -> bool:
    """Whether the run is stored with the settings that it has now."""
    record = stored.runs.get(run.key)
    return record is not None and record["fingerprint"] == run.fingerprint()


def judge_again(store: Store) -> list[str]:
    """Writes the verdicts of all stored experiments whose claims are others than when they ran: their names."""
    changed = []
    for name in (name for name in store.names() if name in packaged("reproductions")):
        definition, stored = load(name), store.read(name)
        if stored.claims != judge(definition, stored):
            store.update(name, lambda s, d=definition: replace(s, claims=judge(d, s)), order_of(definition))  # type: ignore[misc]
            changed.append(name)
    return changed
