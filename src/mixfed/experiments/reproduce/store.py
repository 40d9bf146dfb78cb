"""What an experiment found, in one small file: ``results/NAME.json``.

::

    experiment      its name
    environments    versions and machines, each with a short name
    tuning          what was tried for each method, the scores, and what was chosen
    runs            of every run the command, the settings' fingerprint, metrics by evaluation, ledger, seconds
    claims          whether the claims of the definition hold

Every record of a run or a tuning has a checksum, so that a number that was edited by hand is noticed. Several processes
may write one after another: each reads the file anew and adds what it has.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mixfed.core.files import write_atomically
from mixfed.errors import InputError
from mixfed.experiments.reproduce.plan import Key, fingerprint

Record = dict[str, Any]
FORMAT = 1
SIGNIFICANT = 5
"""Digits of a stored number."""
PATIENCE = 120.0
"""Seconds to wait for another process that writes the same file."""

_RUN: dict[str, Any] = {
    **{"label": str, "cell": str, "seed": int, "command": str, "fingerprint": str, "environment": str},
    **{"executor": str, "seconds": int | float, "rounds": int, "metrics": dict, "ledger": dict, "sum": str},
}
_TUNING: dict[str, Any] = {
    **{"label": str, "command": str, "fingerprint": str, "on": str, "metric": str, "grid": dict, "trials": list},
    **{"chosen": dict, "at_edge": list, "seconds": int | float, "sum": str},
}
_FILE: dict[str, Any] = {"experiment": str, "format": int, "environments": dict, "tuning": list, "runs": list}
_FILE |= {"claims": list}


@dataclass(frozen=True)
class Stored:
    """What a file holds."""

    experiment: str
    runs: dict[Key, Record] = field(default_factory=dict)
    tuning: dict[str, Record] = field(default_factory=dict)
    environments: dict[str, Record] = field(default_factory=dict)
    claims: list[Record] = field(default_factory=list)

    def chosen(self) -> dict[str, dict[str, Any]]:
        """The settings that tuning chose, by label."""
        return {label: record["chosen"] for label, record in self.tuning.items()}

    def with_run(self, record: Record, environment: Record) -> Stored:
        """The same with a run, in place of the one with its key."""
        place, known = self._known(environment)
        entry = sealed(record | {"environment": place})
        return Stored(self.experiment, self.runs | {key_of(entry): entry}, self.tuning, known, self.claims)

    def with_tuning(self, record: Record) -> Stored:
        """The same with what was tried for a method."""
        tuning = self.tuning | {record["label"]: sealed(record)}
        return Stored(self.experiment, self.runs, tuning, self.environments, self.claims)

    def _known(self, environment: Record) -> tuple[str, dict[str, Record]]:
        place = fingerprint(environment)[:6]
        return place, self.environments | {place: environment}


class Store:
    """The files of experiments in a folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def names(self) -> list[str]:
        """The experiments of which something is stored."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def path(self, name: str) -> Path:
        """The file of an experiment."""
        return self.folder / f"{name}.json"

    def read(self, name: str) -> Stored:
        """What is stored of an experiment, nothing where there is no file."""
        path = self.path(name)
        if not path.is_file():
            return Stored(name)
        return parsed(path.read_bytes(), str(path), name)

    def same(self, fingerprint: str) -> tuple[Stored, Record] | None:
        """A run of these settings that any experiment has stored, so that nobody makes it twice."""
        for name in self.names():
            stored = self.read(name)
            for record in stored.runs.values():
                if record["fingerprint"] == fingerprint and "stopped" not in record:
                    return stored, record
        return None

    def update(self, name: str, change: Callable[[Stored], Stored], order: Sequence[Key]) -> Stored:
        """Reads, changes and writes a file while no other process does; runs are in this order."""
        with self._locked(name):
            found = change(self.read(name))
            write_atomically(self.path(name), text_of(found, order).encode())
        return found

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"Cannot write {self.folder}: {error.strerror}.") from error
        lock = FileLock(self.folder / f".{name}.lock", timeout=PATIENCE)
        try:
            lock.acquire()
        except Timeout:
            raise InputError(f"Another process has held {self.path(name)} for {PATIENCE:g} seconds.") from None
        try:
            yield
        finally:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


def key_of(record: Mapping[str, Any]) -> Key:
    """Which run a record is of."""
    return Key(record["label"], record["cell"], record["seed"])


def sealed(record: Mapping[str, Any]) -> Record:
    """The record with its checksum."""
    bare = {name: value for name, value in record.items() if name != "sum"}
    return bare | {"sum": fingerprint(bare)}


def columns(history: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Evaluations as a list for each metric, to as many digits as are kept."""
    entries = list(history)
    names = dict.fromkeys(name for entry in entries for name in entry)
    return {name: [short(entry.get(name)) for entry in entries] for name in names}


def environment() -> Record:
    """What the numbers of a run depend on beside its settings."""
    from mixfed.experiments.running import versions

    return versions() | {"machine": platform.machine(), "processor": _processor(), "cores": os.cpu_count() or 1}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def short(value: Any) -> Any:
    """A number with as many digits as are kept."""
    return float(f"{value:.{SIGNIFICANT}g}") if isinstance(value, float) else value


def text_of(stored: Stored, order: Sequence[Key]) -> str:
    """The file: JSON with a line for each record, so that two versions of it are compared line by line."""
    places = {key: i for i, key in enumerate(order)}
    runs = sorted(stored.runs, key=lambda key: (places.get(key, len(places)), key))
    labels = list(dict.fromkeys(key.label for key in order))
    tuning = sorted(stored.tuning, key=lambda label: labels.index(label) if label in labels else len(labels))
    used = sorted({record["environment"] for record in stored.runs.values()})
    head = {"experiment": stored.experiment, "format": FORMAT}
    parts = [
        *(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()),
        f'"environments": {{{_lines(f"{json.dumps(n)}: {_line(stored.environments[n])}" for n in used)}}}',
        f'"tuning": [{_lines(_line(stored.tuning[label]) for label in tuning)}]',
        f'"runs": [{_lines(_line(stored.runs[key]) for key in runs)}]',
        f'"claims": [{_lines(_line(claim) for claim in stored.claims)}]',
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _lines(texts: Iterable[str]) -> str:
    inner = ",\n".join(texts)
    return f"\n{inner}\n" if inner else ""


def parsed(contents: bytes, what: str, name: str) -> Stored:
    """The contents of a file, every record looked at."""
    try:
        table = json.loads(contents)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is damaged: {error}.") from error
    _require(table, _FILE, what)
    if table["format"] != FORMAT:
        raise InputError(f"{what} has the format {table['format']}, and this version reads {FORMAT}.")
    if table["experiment"] != name:
        raise InputError(f"{what} is of the experiment '{table['experiment']}', not of '{name}'.")
    runs: dict[Key, Record] = {}
    for record in table["runs"]:
        _require(record, _RUN, f"A run in {what}")
        key = key_of(record)
        _require_seal(record, f"The run {key} in {what}")
        _require_columns(record, f"The run {key} in {what}")
        if key in runs:
            raise InputError(f"{what} has the run {key} twice.")
        if record["environment"] not in table["environments"]:
            raise InputError(f"The run {key} in {what} has an environment that the file does not describe.")
        runs[key] = record
    tuning: dict[str, Record] = {}
    for record in table["tuning"]:
        _require(record, _TUNING, f"A tuning in {what}")
        _require_seal(record, f"The tuning of {record['label']} in {what}")
        tuning[record["label"]] = record
    return Stored(name, runs, tuning, table["environments"], table["claims"])


def _require(table: Any, kinds: Mapping[str, Any], what: str) -> None:
    if not isinstance(table, dict):
        raise InputError(f"{what} is no table, so mixfed did not write it.")
    for name, kind in kinds.items():
        if not isinstance(table.get(name), kind) or isinstance(table[name], bool):
            raise InputError(f"{what} is damaged: '{name}' is missing or of another kind.")


def _require_seal(record: Record, what: str) -> None:
    if sealed(record)["sum"] != record["sum"]:
        raise InputError(f"{what} was edited: its checksum is not that of its numbers; run it again.")


def _require_columns(record: Record, what: str) -> None:
    lists = list(record["metrics"].values())
    good = all(isinstance(values, list) and len(values) == len(lists[0]) for values in lists)
    numbers = good and all(_is_number(value) for values in lists for value in values)
    if not numbers or (lists and "round" not in record["metrics"]):
        raise InputError(f"{what} is damaged: its metrics are not lists of numbers, one for each evaluation.")
    if not all(isinstance(value, int | float) for value in record["ledger"].values()):
        raise InputError(f"{what} is damaged: its ledger has something that is no number.")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
