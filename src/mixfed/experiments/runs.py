"""Several runs, each in a folder of its own: trained, or taken as they are where they have finished."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mixfed.core.checkpoint import warn
from mixfed.core.loop import Record
from mixfed.data.scenario import Scenario
from mixfed.errors import RunStopped
from mixfed.experiments.build import build
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.running import run_in_folder
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.watch import UNWATCHED, Interrupted, Watch

Key = TypeVar("Key")


def train_all(
    recipes: Mapping[Key, Recipe],
    folders: Mapping[Key, RunFolder],
    watch: Watch = UNWATCHED,
    deal: Dealer | None = None,
) -> dict[Key, dict[str, Any] | None]:
    """The results of all runs in their order, so that neighbours with the same data and seed share them.

    A run that has a configuration in its folder goes on, and one that has finished is taken as it is. One that stops
    because it diverges has the result None, and the log says why. ``deal`` is what deals the data to runs of several
    calls.
    """
    results: dict[Key, dict[str, Any] | None] = {}
    deal = deal or Dealer()
    with _each_told_once():
        for key, recipe in recipes.items():
            folder = folders[key]
            try:
                found = folder.finished() if folder.config.exists() else None
                results[key] = found or _train(recipe, deal(recipe), folder, watch)
            except RunStopped as error:
                results[key] = None
                warn(f"{recipe.algorithm}, seed {recipe.seed}: {error}")
            if watch.should_stop() and len(results) < len(recipes):
                raise Interrupted(f"{len(results)} of {len(recipes)} runs")
    return results


@contextmanager
def _each_told_once() -> Iterator[None]:
    """Runs share their data, so that what is logged of these by one run need not be logged by the others."""
    log, told = logging.getLogger("mixfed"), set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        before = len(told)
        told.add(record.getMessage())
        return len(told) > before

    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


def take_up(recipes: Mapping[Key, Recipe], out: Path, name: Callable[[Key], str]) -> dict[Key, RunFolder]:
    """The folders of the runs under ``out``; those that hold a run must hold this one."""
    folders = {key: RunFolder(out / name(key)) for key in recipes}
    for key, folder in folders.items():
        if folder.config.exists():
            folder.adopt(recipes[key])
    return folders


def _train(recipe: Recipe, scenario: Scenario, folder: RunFolder, watch: Watch) -> dict[str, Any]:
    moved = watch.begin(f"{recipe.algorithm} · seed {recipe.seed}", recipe.rounds)

    def tell(record: Record) -> None:
        moved(record.round, record.metrics)

    result = run_in_folder(
        build(recipe, scenario),
        folder,
        resume=folder.config.exists(),
        callbacks=[tell],
        should_stop=watch.should_stop,
        page=False,
    )
    if not result.finished:
        raise Interrupted(f"round {result.rounds} of {recipe.rounds} of {recipe.algorithm}, seed {recipe.seed}")
    watch.ended(result)
    return folder.finished() or {}


class Dealer:
    """Deals a recipe's data, and keeps them for the next recipe if that has the same."""

    def __init__(self) -> None:
        self._last: tuple[Recipe, Scenario] | None = None

    def __call__(self, recipe: Recipe) -> Scenario:
        if self._last is None or _decides_data(self._last[0]) != _decides_data(recipe):
            self._last = (recipe, build_scenario(recipe))
        return self._last[1]


def _decides_data(recipe: Recipe) -> tuple[Any, ...]:
    """The settings that the data depend on; features are those of a network."""
    return recipe.seed, recipe.data, recipe.model if recipe.model.cached else None
