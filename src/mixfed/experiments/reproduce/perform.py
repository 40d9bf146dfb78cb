"""Runs what is missing of an experiment; every run is stored as soon as it has finished."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from filelock import FileLock, Timeout

from mixfed.errors import InputError
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.reproduce import tuning
from mixfed.experiments.reproduce.definition import Definition
from mixfed.experiments.reproduce.judge import judge
from mixfed.experiments.reproduce.measure import probed, traced
from mixfed.experiments.reproduce.plan import Asked, Planned, plan, planned
from mixfed.experiments.reproduce.runs import Wanted, is_stored, missing, order_of
from mixfed.experiments.reproduce.store import Record, Store, Stored, columns, environment, short
from mixfed.experiments.runs import Dealer, take_up, train_all
from mixfed.experiments.watch import UNWATCHED, Interrupted, Watch

Say = Callable[[str], None]


def reproduce(
    definition: Definition,
    store: Store,
    out: Path,
    *,
    asked: Asked | None = None,
    wanted: Wanted | None = None,
    watch: Watch = UNWATCHED,
    say: Say = lambda sentence: None,
) -> Stored:
    """Chooses settings that are to be chosen, runs what is missing, and stores both; what is stored then."""
    asked, wanted = asked or Asked(), wanted or Wanted()
    wanted = _checked(definition, wanted)
    order, deal = order_of(definition), Dealer()

    def add(change: Callable[[Stored], Stored]) -> Stored:
        def judged(stored: Stored) -> Stored:
            found = change(stored)
            return replace(found, claims=judge(definition, found))

        return store.update(definition.name, judged, order)

    for run in missing(definition, store.read(definition.name), wanted):
        stored = store.read(definition.name)  # another process may have added to it
        method = run.method
        if tuning.waits(definition, method, stored):
            say(f"Settings of {method.label}: {definition.tune.trials if definition.tune else 0} trials.")
            record = tuning.choose(definition, method, asked, out, watch)
            stored = add(lambda before, found=record: before.with_tuning(found))  # type: ignore[misc]
        run = planned(definition, run.key, stored.chosen().get(method.label, {}), asked)
        if is_stored(run, stored):
            continue
        folder = RunFolder(out / run.folder())
        if _is_busy(folder):
            say(f"{run.key}: another process is at it, so it is left out here.")
            continue
        known = store.same(run.fingerprint())
        found, place = _taken(run, *known) if known else (_run(run, folder, watch, deal), environment())
        stored = add(lambda before, entry=found, at=place: before.with_run(entry, at))  # type: ignore[misc]
        if watch.should_stop():
            raise Interrupted(f"{len(stored.runs)} of {len(order)} runs")
    return add(lambda before: before)


def _checked(definition: Definition, wanted: Wanted) -> Wanted:
    for label in wanted.labels or ():
        definition.method(label)
    for cell in wanted.cells or ():
        definition.cell(cell)
    known = {run.key.seed for run in plan(definition, {})}
    for seed in wanted.seeds or ():
        if seed not in known:
            told = ", ".join(map(str, sorted(known)))
            raise InputError(f"{definition.name} has the seeds {told}, not {seed}.")
    return wanted


def _is_busy(folder: RunFolder) -> bool:
    """Whether another process writes the run in this folder."""
    lock = folder.path / ".lock"
    if not lock.exists():
        return False
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def _taken(run: Planned, stored: Stored, record: Record) -> tuple[Record, Record]:
    """The run that another experiment has stored with the same settings, as one of this, and where it was made."""
    about = {**run.key._asdict(), "command": run.command(), "taken_from": stored.experiment}
    return record | about, stored.environments[record["environment"]]


def _run(run: Planned, folder: RunFolder, watch: Watch, deal: Dealer) -> Record:
    recipe = run.recipe()
    about = {**run.key._asdict(), "command": run.command(), "fingerprint": run.fingerprint()}
    if run.method.of == "probe":
        return about | probed(recipe, watch)
    if run.method.of == "theory":
        return about | traced(recipe, watch)
    folders = take_up({run.key: recipe}, folder.path.parent, lambda key: folder.path.name)
    result = train_all({run.key: recipe}, folders, watch, deal)[run.key]
    return about | _trained(recipe, folder, result)


def _trained(recipe: Recipe, folder: RunFolder, result: Record | None) -> Record:
    """What is kept of a run in its folder; of one that stopped, why, and how far it was."""
    history = folder.history()
    if result is None:
        why = folder.stopped.read_text(encoding="utf-8", errors="replace").strip()
        rounds = history[-1]["round"] if history else 0
        ended: Record = {"seconds": 0.0, "rounds": rounds, "ledger": {}, "stopped": why.splitlines()[0][:200]}
        return {"executor": recipe.simulator.executor, "metrics": columns(history)} | ended
    ended = {name: result[name] for name in ("rounds", "seconds", "ledger")}
    broken = {"broken": result["broken"]} if result.get("broken") else {}
    return {"executor": _executor(folder), "metrics": columns(history), **ended, **broken, **_told(folder)}


def _told(folder: RunFolder) -> Record:
    """What an algorithm with diagnostics told of itself: the mean of each over the rounds that have it."""
    entries = folder.diagnosed()
    names = dict.fromkeys(name for entry in entries for name in entry if name != "round")
    found = {name: short(fmean(entry[name] for entry in entries if name in entry)) for name in names}
    return {"diagnostics": found} if found else {}


def _executor(folder: RunFolder) -> str:
    """How clients were simulated, as one word for each source."""
    found = json.loads(folder.result.read_bytes()).get("simulation", {}).get("executions", {})
    return ", ".join(f"{source} {how.partition(' ')[0]}".strip() for source, how in found.items()) or "auto"
