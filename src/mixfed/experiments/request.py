"""What a user asks for: a recipe by its name, and settings that go over it.

Nothing here needs PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mixfed.experiments.schema import Table
from mixfed.experiments.texts import recipe_table

if TYPE_CHECKING:
    from mixfed.experiments.recipe import Recipe

_KEYS = {
    "executor": "simulator.executor",
    "deterministic_sum": "simulator.deterministic_sum",
    "max_minutes": "stop.minutes",
    "max_bytes": "stop.bytes",
}
"""Options whose name is not their key in a recipe."""


class Request:
    """A recipe (a packaged one, or the path of a TOML file), ``key=value`` settings, and options by name.

    ``options`` are keys of the recipe with their values (None: not given), ``data`` is the folder with data files, and
    ``tuned`` a file of settings that were chosen by tuning.
    """

    def __init__(
        self,
        recipe: str,
        settings: Sequence[str] = (),
        *,
        data: Path | None = None,
        tuned: Path | None = None,
        **options: Any,
    ) -> None:
        recipe_table(recipe)
        self.recipe = recipe
        self.settings = list(settings)
        self.tuned = tuned
        self.options = {_KEYS.get(key, key): value for key, value in options.items() if value is not None}
        if data is not None:
            self.options["data.folder"] = os.path.realpath(data)

    def base(self) -> Table:
        """The recipe as it was written."""
        from mixfed.experiments import toml

        return toml.load(self.recipe)

    def with_settings(self, settings: Sequence[str]) -> Request:
        """The same with more settings, which those of the user may overrule."""
        more = copy(self)
        more.settings = [*settings, *self.settings]
        return more

    def sets(self) -> set[str]:
        """The keys that have one value by the user's wish."""
        return {setting.partition("=")[0].strip() for setting in self.settings} | set(self.options)

    def on(self, table: Table, **more: Any) -> Recipe:
        """The complete recipe: a table with the settings, then the options, then ``more`` applied.

        They come after what the table, and a file of tuned settings over it, says for the algorithm that they choose.
        """
        from mixfed.experiments import toml

        return toml.resolve(self.written(table, **more))

    def written(self, table: Table, **more: Any) -> Table:
        """The table of :meth:`on` before defaults are filled in."""
        from mixfed.experiments import toml
        from mixfed.experiments.recipe import Recipe

        if self.tuned is not None:
            table = toml.with_tuned(table, self.tuned)
        whole = toml.with_short_forms(self._set(table, more))
        table = table | {"methods": whole["methods"]} if "methods" in whole else table
        return self._set(toml.chosen(table, whole.get("algorithm", Recipe.algorithm)), more)

    def recipes(self, algorithms: Sequence[str], seeds: Iterable[int]) -> list[Recipe]:
        """The complete recipe with each of the algorithms and seeds, seed by seed."""
        from mixfed.experiments.methods import with_methods

        base, names = with_methods(self.base(), algorithms)
        return [self.on(base, algorithm=name, seed=seed) for seed in seeds for name in names]

    def _set(self, table: Table, more: Table) -> Table:
        from mixfed.experiments import toml

        table = toml.override(table, self.settings)
        for key, value in (self.options | more).items():
            toml.set_key(table, key.split("."), value)
        return table
