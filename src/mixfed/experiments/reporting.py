"""Reports of run folders: what the files of runs say, shown as one page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from mixfed.errors import InputError
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.report.page import write_report
from mixfed.experiments.report.view import View

NAME = "report.html"


def report(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes one report of all runs in these folders, each of which is a run or holds runs (a comparison, a study).

    It is written into the folder if there is one, and else to ``out`` or ``report.html`` here.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise InputError("A report is of one or more folders with runs; name them.")
    file = Path(out) if out else (paths[0] / NAME if len(paths) == 1 else Path(NAME))
    runs = [run for path in paths for run in runs_in(path)]
    write_report(file, [view_of(run) for run in runs], "\n".join(repeat_command(run) for run in runs))
    return file


def runs_in(path: Path) -> list[RunFolder]:
    """The run in this folder, or the finished runs in the folders directly below it (a comparison's in its order)."""
    if not path.is_dir():
        raise InputError(f"There is no folder {path}; name the folder of a run or of a comparison.")
    if (path / "config.toml").is_file():
        run = RunFolder(path)
        if run.finished() is None:
            raise InputError(f"The run in {path} has not finished; go on with it by --resume.")
        return [run]
    below = [RunFolder(folder) for folder in sorted(path.iterdir()) if (folder / "config.toml").is_file()]
    found = [run for run in below if not run.stopped.is_file() and run.finished() is not None]
    if not found:
        raise InputError(f"{path} holds no finished run; name the folder of a run or of a comparison.")
    order = _algorithms(path)

    def place(run: RunFolder) -> tuple[int, int]:
        recipe = run.stored()
        return (order.index(recipe.algorithm) if recipe.algorithm in order else len(order), recipe.seed)

    return sorted(found, key=place)


def _algorithms(path: Path) -> list[str]:
    """The algorithms of the comparison in this folder, in its order; none where there is no comparison."""
    file = path / "comparison.json"
    try:
        return list(json.loads(file.read_bytes())["algorithms"]) if file.is_file() else []
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is no comparison; remove it, and compare again with --resume.") from error


def view_of(folder: RunFolder) -> View:
    """What the files of a finished run say."""
    facts = folder.known_facts()
    return View(
        folder.stored(),
        folder.path,
        folder.finished() or {},
        folder.history(),
        facts.get("costs", []),
        folder.diagnosed(),
        facts,
    )


def repeat_command(folder: RunFolder) -> str:
    """The command that repeats a run bit for bit."""
    return f"mixfed run {shlex.quote(str(folder.config))} --out {shlex.quote(str(folder.path) + '-again')}"
