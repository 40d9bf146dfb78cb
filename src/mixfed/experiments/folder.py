"""A run in its folder: what is written where, and how a run that stopped is taken up again.

::

    config.toml         the complete recipe
    recipe.toml         what the user's recipe said, without the settings of the command line
    data.json           of data from files: classes, categories and scales, as they were learnt from training examples
    metrics.jsonl       one object per evaluated round
    diagnostics.jsonl   one object per round, of algorithms that have diagnostics (with diagnostics.png in the end)
    checkpoints/        the newest and the one before, and what clients keep to themselves on disk
    model.safetensors   the final parameters     ┐
    metrics.png         the metrics over rounds  │
    best.safetensors    the best parameters on validation examples, of a run with [stop] metric
    facts.json          who holds what, costs …  ├ once the run has finished
    report.html         all of it, to look at    │
    result.json         metrics, ledger, …       ┘ (written last)
    stopped.txt         why the run stopped, if it could not go on

While a run writes there, the folder is locked (``.lock``). What a resumed run reads has checksums, and checkpoints know
the run that they are of.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from mixfed.core.checkpoint import Checkpoints
from mixfed.core.files import append, refuse_links, sweep, write_atomically
from mixfed.core.loop import Record
from mixfed.core.tree import flatten
from mixfed.errors import InputError, RunStopped
from mixfed.experiments import toml
from mixfed.experiments.inputs import require_same_inputs
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.schema import Table

OF_OBJECTS = "mixfed.experiments.objects:"
"""How the names of Python objects begin, of which a user knows nothing."""
_OF_A_FEDERATION = ("deadline", "ttl", "assemble", "poll")
_FOLDERS = ("data.folder", "data.cache", "home")
MAY_CHANGE = (*_FOLDERS, "simulator.timeout", *(f"federation.{name}" for name in _OF_A_FEDERATION))
"""Settings that a resumed run may be given anew; the number of rounds may also be raised."""

CHOOSE_FOR_ME = {"simulator.executor": "auto", "simulator.threads": 0, "simulator.chunk": 0, "simulator.cores": 0}
"""Settings that leave a choice to the run; a resumed run keeps the choice that it made."""

_RESULT: dict[str, Any] = {"metrics": dict, "ledger": dict, "rounds": int, "seconds": int | float, "seed": int}
_CHECKSUM = re.compile(rb"# checksum ([0-9a-f]{32})[^\n]*\n")


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.recipe = self.path / "recipe.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.model = self.path / "model.safetensors"
        self.diagnostics = self.path / "diagnostics.jsonl"
        self.plot = self.path / "metrics.png"
        self.diagnostics_plot = self.path / "diagnostics.png"
        self.best = self.path / "best.safetensors"
        self.facts = self.path / "facts.json"
        self.report = self.path / "report.html"
        self.result = self.path / "result.json"
        self.stopped = self.path / "stopped.txt"
        self.data = self.path / "data.json"
        self.checkpoints = self.path / "checkpoints"
        self._lock = FileLock(self.path / ".lock", timeout=0)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For as long as something is written here: no other process can, and the lock ends with this one."""
        if self._lock.is_locked:
            yield
            return
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self._take_lock()
            yield
        finally:
            if self._lock.is_locked:
                Path(self._lock.lock_file).unlink(missing_ok=True)
                self._lock.release()
            with suppress(OSError):  # for other files may be in it
                for folder in missing:
                    folder.rmdir()

    def _take_lock(self) -> None:
        written = [path for path in vars(self).values() if isinstance(path, Path)]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_links([path for path in (*written, Path(self._lock.lock_file)) if path != self.path])
            refuse_links(self.checkpoints.rglob("*"))
            self._lock.acquire()
            sweep(self.path)
            sweep(self.checkpoints)
        except Timeout:
            raise InputError(
                f"Another process is writing the run in {self.path}; wait for its end, or choose another folder."
            ) from None
        except OSError as error:
            raise InputError(f"Cannot write {error.filename or self.path}: {error.strerror}.") from error

    def stored(self) -> Recipe:
        """The recipe of the run in this folder."""
        return toml.resolve(self.stored_table())

    def stored_table(self) -> dict[str, Any]:
        """The recipe of the run in this folder, as a table."""
        if not self.config.is_file():
            raise InputError(f"{self.path} is not a run: it has no config.toml; leave out --resume to start one there.")
        return _unsealed(self.config)

    def edited(self, written: Table) -> list[tuple[list[str], Any]]:
        """What the user's recipe, as written for this run's algorithm, says now and did not when the run began.

        Without a record of what it said (a run of ``compare``, say) this is all that it says.
        """
        before = list(toml.leaves(_unsealed(self.recipe))) if self.recipe.is_file() else []
        now = list(toml.leaves(written))
        for parts, value in before:
            if parts not in [path for path, _ in now] and ".".join(parts) not in MAY_CHANGE:
                told = f"The run in {self.path} began with a recipe that says {'.'.join(parts)} = {value!r}"
                raise InputError(f"{told}, and it no longer does; put that back, or start a new run.")
        return [leaf for leaf in now if leaf not in before]

    def require_unused(self) -> None:
        """Refuses to write over another run."""
        if self.config.exists() or self.checkpoints.exists():
            raise InputError(
                f"{self.path} already holds a run; go on with --resume, or choose another folder with --out."
            )
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file, not a folder; choose another folder with --out.")

    def adopt(self, wanted: Recipe) -> None:
        """Takes up the run in this folder with the wanted recipe, if that is the same run (or more rounds of it)."""
        stored = self.stored()
        old, new = _dotted(stored), _dotted(wanted)
        for key in [*old, *(k for k in new if k not in old)]:
            if old.get(key) == new.get(key) or key in MAY_CHANGE:
                continue
            if key in CHOOSE_FOR_ME and new.get(key) == CHOOSE_FOR_ME[key]:
                continue
            if key.startswith("simulator.chosen") and not wanted.simulator.chosen:
                continue
            if key.startswith("inputs") and not wanted.inputs:
                continue
            if key == "rounds" and new[key] > old[key]:
                self._refuse_plans(wanted, old[key])
                continue
            of_objects = [str(side[key]) for side in (old, new) if str(side.get(key)).startswith(OF_OBJECTS)]
            if of_objects:
                kind = of_objects[0].removeprefix(OF_OBJECTS).partition("_")[0]
                raise InputError(f"The run in {self.path} has another {kind}; give it that, or choose another folder.")
            told = f"The run in {self.path} has {key} = {old.get(key)!r}"
            raise InputError(f"{told}, and a resumed one cannot have {new.get(key)!r}; choose another folder.")
        wanted = replace(wanted, simulator=stored.simulator, inputs=stored.inputs)
        if wanted != stored:
            require_same_inputs(wanted, f"the run in {self.path} began")
            with self.locked():
                if wanted.rounds != stored.rounds:
                    self.result.unlink(missing_ok=True)
                self.write_config(wanted)

    def _refuse_plans(self, recipe: Recipe, rounds: int) -> None:
        """A run that divided its rounds up cannot have been one of more rounds."""
        chain = (recipe.algorithm, recipe.algorithm_options().get("base"))
        if "transfer" in chain and not recipe.algorithms.get("transfer", {}).get("central_rounds"):
            raise InputError(
                f"The run in {self.path} gave half of its {rounds} rounds to the centre, so it cannot be made longer;"
                f" start a new run of {recipe.rounds} rounds."
            )

    def write_config(self, recipe: Recipe, written: Table | None = None) -> None:
        """Writes the complete recipe, and beside it what the user has ``written``.

        A run may write it again with other settings of the simulator, and stays the same run.
        """
        if written is not None:
            write_atomically(self.recipe, _sealed(tomli_w.dumps(written)))
        write_atomically(self.config, _sealed(recipe.toml()))

    def forget(self) -> None:
        """Removes the traces of a run that was refused before it began, so that the mended command can use the name."""
        for file in (self.config, self.recipe, self.data, self.metrics, self.diagnostics):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # other files may be in the folder
            self.path.rmdir()

    def note_stop(self, why: str) -> None:
        """Writes down why a run could not go on."""
        write_atomically(self.stopped, f"{why}\n".encode())

    def finished(self) -> dict[str, Any] | None:
        """The result, if the run has finished; why it could not, if it stopped, for it would stop there again."""
        if self.stopped.is_file():
            why = self.stopped.read_text(encoding="utf-8", errors="replace").strip()
            raise RunStopped(f"The run in {self.path} stopped and would stop there again: {why}")
        if not self.result.is_file():
            return None
        result = _parsed(self.result.read_bytes(), str(self.result))
        for name, kind in _RESULT.items():
            value = result.get(name)
            if not isinstance(value, kind) or (isinstance(value, dict) and not _has_numbers(value)):
                raise InputError(f"{self.result} is no result of a run (see {name}); remove it and use --resume.")
        return result

    def known_facts(self) -> dict[str, Any]:
        """What a report tells of the run beside its metrics (:mod:`mixfed.experiments.facts`)."""
        return _parsed(self.facts.read_bytes(), str(self.facts)) if self.facts.is_file() else {}

    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        return bool(Checkpoints(self.checkpoints).files())

    def history(self) -> list[dict[str, Any]]:
        """The evaluated rounds so far."""
        return _entries(self.metrics)

    def diagnosed(self) -> list[dict[str, Any]]:
        """The diagnostics of all rounds that have some."""
        return _entries(self.diagnostics)

    def write_history(self, history: Iterable[Mapping[str, Any]], diagnostics: Sequence[Mapping[str, Any]]) -> None:
        """Writes all evaluated and all diagnosed rounds anew."""
        write_atomically(self.metrics, "".join(_line(entry) for entry in history).encode())
        if diagnostics or self.diagnostics.exists():
            write_atomically(self.diagnostics, "".join(_line(entry) for entry in diagnostics).encode())

    def append(self, record: Record) -> None:
        """A callback: one more line for a round that was evaluated or diagnosed."""
        for path, values in ((self.metrics, record.metrics), (self.diagnostics, record.diagnostics)):
            if values:
                append(path, _line({"round": record.round, **values}).encode())


def identity(recipe: Recipe) -> str:
    """A fingerprint of what makes a run the run that it is: all but how it is simulated and what may change."""
    table = {
        key: value
        for key, value in _dotted(recipe).items()
        if key not in ("rounds", *MAY_CHANGE) and not key.startswith(("simulator.", "inputs"))
    }
    return _fingerprint(json.dumps(table, sort_keys=True).encode())


def clean(value: Any) -> Any:
    """The same with null for numbers that JSON cannot write."""
    if isinstance(value, Mapping):
        return {name: clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _entries(file: Path) -> list[dict[str, Any]]:
    lines = file.read_bytes().splitlines() if file.is_file() else []
    found = [_parsed(line, f"Line {i + 1} of {file}") for i, line in enumerate(lines)]
    for i, entry in enumerate(found):
        if not isinstance(entry.get("round"), int) or not _has_numbers(entry):
            told = f"Line {i + 1} of {file} is not a round with its numbers"
            raise InputError(f"{told}; remove {file.with_name('result.json')} and use --resume.")
    return found


def _has_numbers(entry: Mapping[str, Any]) -> bool:
    return all(value is None or isinstance(value, int | float) for value in entry.values())


def _parsed(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object, or a sentence."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise InputError(f"{what} is no JSON object, so mixfed did not write it; remove it and use --resume.")
    return found


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(clean(entry)) + "\n"


def _dotted(recipe: Recipe) -> dict[str, Any]:
    return {key.replace("/", "."): value for key, value in flatten(recipe.table()).items()}


def _fingerprint(contents: bytes) -> str:
    return hashlib.blake2b(contents, digest_size=16).hexdigest()


def _sealed(text: str) -> bytes:
    """TOML with a checksum in a comment above it."""
    contents = text.encode()
    told = "a resumed run refuses this file where it was edited, so edit a copy"
    return f"# checksum {_fingerprint(contents)}: {told}\n".encode() + contents


def _unsealed(file: Path) -> Table:
    """The table in a file of :func:`_sealed`, which must be as it was written."""
    contents = file.read_bytes()
    try:
        table = tomllib.loads(contents.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{file} is damaged, so the run cannot be resumed: {error}.") from error
    seal = _CHECKSUM.match(contents)
    if seal is None or seal[1].decode() != _fingerprint(contents[seal.end() :]):
        raise InputError(f"{file} is not as the run wrote it; undo the edit, or start a new run with a copy of it.")
    return table
