"""``mixfed run``."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mixfed.backends.distributed.launch import restarts, started_by_torchrun
from mixfed.backends.distributed.ranks import Ranks
from mixfed.cli.common import Interrupts, progress, report_faults, say_how_to_go_on, say_that_it_begins
from mixfed.cli.console import stdout
from mixfed.cli.ranks import Task, agreed, follow, tell, together
from mixfed.core.loop import Result
from mixfed.errors import InputError, RunStopped
from mixfed.experiments import toml
from mixfed.experiments.build import Experiment, build
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.bars import begin, shown_on
from mixfed.experiments.report.files import folder_for
from mixfed.experiments.report.tables import run_table
from mixfed.experiments.request import Request
from mixfed.experiments.running import run_in_folder

if TYPE_CHECKING:
    from mixfed.experiments.trackers import Tracker


def execute(given: Request, out: Path | None, *, resume: bool, track: str | None, as_json: bool) -> None:
    """Runs a recipe, or goes on with a run."""
    if given.on(given.base()).theory.rho:
        from mixfed.cli import theory

        if started_by_torchrun():
            raise InputError(
                "A recipe of curves in closed form trains nothing that ranks could share; leave out torchrun."
            )
        unused = {"algorithm": given.options.get("algorithm"), "rounds": given.options.get("rounds"), "track": track}
        for option, value in (unused | {"resume": resume}).items():
            if value:
                raise InputError(f"A recipe of curves in closed form trains no algorithm; leave out --{option}.")
        theory.execute(given.on(given.base()), out, as_json)
        return
    with together(given.on(given.base()).simulator.timeout) as ranks:
        if ranks and not ranks.leads:
            follow(ranks)
        else:
            _lead(given, out, resume, track, as_json, ranks)


def _lead(
    given: Request, out: Path | None, resume: bool, track: str | None, as_json: bool, ranks: Ranks | None
) -> None:
    """Opens the folder, trains (with the other ranks, if there are some) and prints what came of it."""
    with ExitStack() as stack:
        with agreed(ranks):
            folder, recipe, resume = open_folder(given, out, resume)
            found = folder.finished() if resume else None
            if found is None:
                stack.enter_context(folder.locked())
        tell(ranks, None if found else Task(recipe, folder.checkpoints, resume))
        if found is None:
            with agreed(ranks):
                experiment = build(recipe)
            train(given, recipe, folder, resume, track, lambda say: experiment, ranks)
            found = folder.finished() or {}
    show(recipe, folder, found, as_json)


def show(recipe: Recipe, folder: RunFolder, found: dict[str, Any], as_json: bool) -> None:
    """The table of a run, and where it is."""
    stdout.print(run_table(recipe, found))
    if found.get("ended"):
        stdout.print(f"Ended early: {found['ended']}", soft_wrap=True)
    stdout.print(f"Run folder: {folder.path}\nPlot: {folder.plot}\nReport: {folder.report}", soft_wrap=True)
    if as_json:
        print(json.dumps(found))
    if found.get("broken"):
        raise RunStopped(f"The run ended broken. {found['broken']}")


def open_folder(given: Request, out: Path | None, resume: bool) -> tuple[RunFolder, Recipe, bool]:
    """The run's folder and recipe, and whether there is a run to resume.

    A resumed run takes its recipe from the folder and refuses another one. One that ``torchrun`` has started anew is
    resumed without being asked.
    """
    base = given.base()
    if out is None:
        recipe = given.on(base)
        out = folder_for(out, f"{recipe.name}-{recipe.algorithm}-seed{recipe.seed}")
    folder = RunFolder(out)
    resume = resume or (restarts() > 0 and folder.config.exists())
    if resume and not folder.config.exists() and not folder.checkpoints.exists():
        say_that_it_begins(folder.path, "no run, so one begins")
        resume = False
    if not resume:
        folder.require_unused()
        return folder, given.on(base), False
    table = folder.stored_table()
    for parts, value in folder.edited(toml.chosen(base, table["algorithm"])):
        toml.set_key(table, parts, value)
    recipe = given.on(table)
    folder.adopt(recipe)
    return folder, recipe, True


def train(
    given: Request,
    recipe: Recipe,
    folder: RunFolder,
    resume: bool,
    track: str | None,
    make: Callable[[Callable[[str], None]], Experiment],
    ranks: Ranks | None = None,
) -> Result:
    """Trains with a bar that shows how far it is; ``make`` is told where sentences of the experiment go."""
    with agreed(ranks), Interrupts() as interrupts, progress() as bar:
        trackers = _trackers(track, recipe, folder, resume)

        def say(text: str) -> None:
            bar.console.print(text, style="dim", markup=False, soft_wrap=True)

        task = begin(bar, f"{recipe.name} · {recipe.algorithm}", recipe.rounds)
        try:
            result = run_in_folder(
                make(say),
                folder,
                resume=resume,
                callbacks=[shown_on(bar, task), *trackers],
                should_stop=interrupts.asked,
                say=say,
                written=toml.chosen(given.base(), recipe.algorithm),
                ranks=ranks,
            )
        except RunStopped as error:
            where = f" The last good checkpoint is in {folder.checkpoints}." if folder.has_checkpoint() else ""
            raise type(error)(f"{error}{where}") from error
        finally:
            for tracker in trackers:
                tracker.close()
    report_faults(result)
    if not result.finished:
        say_how_to_go_on(f"round {result.rounds} of {recipe.rounds}")
        raise interrupts.exit()
    return result


def _trackers(track: str | None, recipe: Recipe, folder: RunFolder, resume: bool) -> list[Tracker]:
    if track is None:
        return []
    from mixfed.experiments.trackers import tracker

    return [tracker(track, folder.path, recipe, resume)]
