"""``mixfed compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mixfed.cli.common import Given, Interrupts, progress, shown_on, stdout, words
from mixfed.cli.probe import predict
from mixfed.cli.run import report_dropped, say_how_to_go_on
from mixfed.core.files import write_atomically
from mixfed.errors import InputError, RunStopped
from mixfed.experiments.build import build
from mixfed.experiments.dealing import build_scenario
from mixfed.experiments.folder import RunFolder, folder_for, result_json, run_in_folder
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.comparison import compare_results
from mixfed.experiments.report.plot import plot_comparison
from mixfed.experiments.report.probe import prediction_words
from mixfed.experiments.report.tables import comparison_tables

MIXED = ("parallel", "gradient_1way", "gradient_2way")


def execute(
    given: Given, algorithms: str, seeds: str, out: Path | None, *, resume: bool, as_json: bool, probe: bool = True
) -> None:
    """Runs every algorithm with every seed, each in a folder of its own, and sums up.

    Where mixed methods are compared, what a short probe predicts is printed beside what happened.
    """
    names, numbers = words(algorithms, "--algorithms"), numbers_of(seeds)
    base = given.base()
    recipes = {(n, s): given.on(base, algorithm=n, seed=s) for s in numbers for n in names}
    first = next(iter(recipes.values()))
    out = folder_for(out, f"{first.name}-compare")
    folders = {(n, s): RunFolder(out / f"{n}-seed{s}") for n, s in recipes}
    _open(recipes, folders, out, resume)
    results = _train_all(recipes, folders)

    comparison = compare_results({n: [results[n, s] for s in numbers] for n in names})
    mixed = [n for n in names if n in MIXED]
    if probe and "parallel" in mixed and len(mixed) > 1:
        comparison["probe"] = predict(first)
    write_atomically(out / "comparison.json", (json.dumps(comparison, indent=2) + "\n").encode())
    curves = {n: [folders[n, s].history() for s in numbers] for n in names}
    plot_comparison(out / "comparison.png", first.title or first.name, curves)
    stdout.print(*comparison_tables(first, comparison))
    if "probe" in comparison:
        stdout.print(prediction_words(comparison["probe"], comparison["algorithms"], mixed), soft_wrap=True)
    stdout.print(f"Comparison: {out / 'comparison.json'}\nPlot: {out / 'comparison.png'}", soft_wrap=True)
    if as_json:
        print(json.dumps(comparison))


def _open(
    recipes: dict[tuple[str, int], Recipe], folders: dict[tuple[str, int], RunFolder], out: Path, resume: bool
) -> None:
    """Refuses to write over other runs; with ``resume`` takes up those of the same recipe."""
    if resume and not any(folder.config.exists() for folder in folders.values()):
        raise InputError(f"{out} holds none of these runs; leave out --resume to start them there.")
    if not resume and (out / "comparison.json").exists():
        raise InputError(f"{out} already holds a comparison; go on with --resume, or choose another folder with --out.")
    for key, folder in folders.items():
        if resume and folder.config.exists():
            folder.adopt(recipes[key])
        else:
            folder.require_unused()


def _train_all(
    recipes: dict[tuple[str, int], Recipe], folders: dict[tuple[str, int], RunFolder]
) -> dict[tuple[str, int], dict[str, Any]]:
    """The results of all runs, seed by seed so that a seed's data are dealt once."""
    results: dict[tuple[str, int], dict[str, Any]] = {}
    dealt: tuple[int | None, Any] = (None, None)
    with Interrupts() as interrupts, progress() as bar:
        for (name, seed), recipe in recipes.items():
            folder = folders[name, seed]
            found = folder.finished()
            if found is None:
                if dealt[0] != seed:
                    dealt = (seed, build_scenario(recipe))
                found = train_in(recipe, dealt[1], folder, interrupts, bar)
            results[name, seed] = found
            if interrupts.asked() and len(results) < len(recipes):
                bar.stop()
                say_how_to_go_on(f"{len(results)} of {len(recipes)} runs")
                raise interrupts.exit()
    return results


def train_in(recipe: Recipe, scenario: Any, folder: RunFolder, interrupts: Interrupts, bar: Progress) -> dict[str, Any]:
    """Trains (or goes on training) in a folder of its own; an interrupt ends the command."""
    task = bar.add_task(f"{recipe.algorithm} · seed {recipe.seed}", total=recipe.rounds, told="")
    try:
        result = run_in_folder(
            build(recipe, scenario),
            folder,
            resume=folder.config.exists(),
            callbacks=[shown_on(bar, task)],
            should_stop=interrupts.asked,
        )
    except RunStopped as error:
        raise RunStopped(f"{recipe.algorithm}, seed {recipe.seed}: {error}") from error
    if not result.finished:
        bar.stop()
        say_how_to_go_on(f"round {result.rounds} of {recipe.rounds} of {recipe.algorithm}, seed {recipe.seed}")
        raise interrupts.exit()
    report_dropped(result)
    return result_json(result, recipe.evaluate.best_of_last)


def numbers_of(seeds: str) -> list[int]:
    """Seeds from text with commas between."""
    return [_seed(word) for word in words(seeds, "--seeds")]


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"A seed is a whole number, not '{text}'.") from None
