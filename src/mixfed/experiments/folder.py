"""A run in its folder: what is written where, and how a run that stopped is taken up again.

::

    config.toml         the complete recipe
    metrics.jsonl       one object per evaluated round
    diagnostics.jsonl   one object per round, of algorithms that have diagnostics (with diagnostics.png in the end)
    checkpoints/        the newest and the one before
    model.safetensors   the final parameters     ┐
    metrics.png         the metrics over rounds  ├ once the run has finished
    result.json         metrics, ledger, …       ┘ (written last)
"""

from __future__ import annotations

import json
import math
import platform
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mixfed.core.checkpoint import Checkpoints, save_params, write_atomically
from mixfed.core.loop import Callback, Record, Result
from mixfed.core.tree import flatten
from mixfed.errors import InputError
from mixfed.experiments import scores, toml
from mixfed.experiments.build import Experiment
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.plot import plot_diagnostics, plot_run

MAY_CHANGE = ("data.folder",)
"""Settings that a resumed run may be given anew; the number of rounds may also be raised."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.model = self.path / "model.safetensors"
        self.diagnostics = self.path / "diagnostics.jsonl"
        self.plot = self.path / "metrics.png"
        self.diagnostics_plot = self.path / "diagnostics.png"
        self.result = self.path / "result.json"
        self.checkpoints = self.path / "checkpoints"

    def stored(self) -> Recipe:
        """The recipe of the run in this folder."""
        return toml.resolve(self.stored_table())

    def stored_table(self) -> dict[str, Any]:
        """The recipe of the run in this folder, as a table."""
        if not self.config.is_file():
            raise InputError(f"{self.path} is not a run: it has no config.toml; leave out --resume to start one there.")
        try:
            return tomllib.loads(self.config.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{self.config} is damaged, so the run cannot be resumed: {error}.") from error

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
        old, new = flatten(stored.table()), flatten(wanted.table())
        for key in [*old, *(k for k in new if k not in old)]:
            dotted = key.replace("/", ".")
            if old.get(key) == new.get(key) or dotted in MAY_CHANGE:
                continue
            if dotted == "rounds" and new[key] > old[key]:
                continue
            told = f"The run in {self.path} has {dotted} = {old.get(key)!r}"
            raise InputError(f"{told}, and --resume cannot make it {new.get(key)!r}; start a new run for that.")
        if wanted != stored:
            self.result.unlink(missing_ok=True)
            self.write_config(wanted)

    def write_config(self, recipe: Recipe) -> None:
        """Writes the complete recipe."""
        write_atomically(self.config, recipe.toml().encode())

    def forget(self) -> None:
        """Removes the traces of a run that was refused before it began, so that the mended command can use the name."""
        self.config.unlink(missing_ok=True)
        self.metrics.unlink(missing_ok=True)
        self.diagnostics.unlink(missing_ok=True)
        with suppress(OSError):  # other files may be in the folder
            self.path.rmdir()

    def finished(self) -> dict[str, Any] | None:
        """The result, if the run has finished."""
        if not self.result.is_file():
            return None
        try:
            result: dict[str, Any] = json.loads(self.result.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{self.result} is damaged: {error}.") from error
        return result

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
            if not values:
                continue
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(_line({"round": record.round, **values}))
            except OSError as error:
                raise InputError(f"Cannot write {path}: {error.strerror}.") from error


def run_in_folder(
    experiment: Experiment,
    folder: RunFolder,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda sentence: None,
) -> Result:
    """Runs (or goes on) and writes everything down; an interrupted run has its checkpoint and no result."""
    recipe = experiment.recipe
    checkpoints = Checkpoints(folder.checkpoints, recipe.checkpoint.every)
    if not resume:
        folder.write_config(recipe)
    saved = checkpoints.load() if resume else None
    folder.write_history(*((saved["history"], saved["diagnostics"]) if saved else ([], [])))
    try:
        result = experiment.run(
            callbacks=[folder.append, *callbacks],
            checkpoints=checkpoints,
            resume=resume,
            should_stop=should_stop,
            say=say,
        )
    except InputError:
        if not folder.checkpoints.exists():
            folder.forget()
        raise
    if result.finished:
        folder.write_history(result.history, result.diagnostics)
        save_params(folder.model, result.params)
        plot_run(folder.plot, f"{recipe.name}: {recipe.algorithm}", folder.history())
        if result.diagnostics:
            plot_diagnostics(folder.diagnostics_plot, f"{recipe.name}: {recipe.algorithm}", folder.diagnosed())
        found = result_json(result, recipe.evaluate.best_of_last)
        write_atomically(folder.result, (json.dumps(found, indent=2) + "\n").encode())
    return result


def result_json(result: Result, best_of_last: int = 1) -> dict[str, Any]:
    """What result.json holds: each metric as last evaluated, or the best of so many last evaluations."""
    figures = {name: scores.best_of_last(result.history, name, best_of_last) for name in result.metrics}
    return {
        "metrics": clean(figures),
        "ledger": result.ledger,
        "rounds": result.rounds,
        "seconds": round(result.seconds, 3),
        "seed": result.seed,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """What a result depends on beside the recipe."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("mixfed", "torch", "numpy")}


def clean(value: Any) -> Any:
    """The same with null for numbers that JSON cannot write."""
    if isinstance(value, Mapping):
        return {name: clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _entries(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines]


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(clean(entry)) + "\n"
