"""From a recipe's text and the user's ``key=value`` settings to a complete recipe."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mixfed.core.registry import CRITERIA
from mixfed.errors import InputError
from mixfed.evaluate.registry import METRICS
from mixfed.experiments import own
from mixfed.experiments import schema as _schema
from mixfed.experiments.beforehand import check_beforehand
from mixfed.experiments.methods import algorithm_options, find_algorithm, with_methods
from mixfed.experiments.recipe import EVALUATION_SETS, Recipe
from mixfed.experiments.schema import Table, is_own, shortened
from mixfed.experiments.texts import DEEPEST, parse, read_text, recipe_table, value_of


def resolve(table: Table) -> Recipe:
    """The complete recipe of a table: every key checked, every default filled in."""
    table = with_short_forms(table)
    table = _with_lengths(chosen(table, table.get("algorithm", Recipe.algorithm)))
    recipe = _schema.read(Recipe, table, _finder(table))
    find_algorithm(recipe.algorithm, table)
    given: dict[str, Table] = {recipe.algorithm: {}} | recipe.algorithms
    complete = {
        name: algorithm_options(find_algorithm(name, table), options, f"algorithms.{name}.")
        for name, options in given.items()
    }
    _named(recipe.model.criterion, CRITERIA, "model.criterion", recipe.home)
    for metric in recipe.evaluate.metrics:
        _named(metric, METRICS, "evaluate.metrics", recipe.home)
    if recipe.stop.metric:
        _named(recipe.stop.metric, METRICS, "stop.metric", recipe.home)
    for part in recipe.evaluate.sets:
        _schema.one_of(part, EVALUATION_SETS, "evaluate.sets")
    options = {name: options for name, options in complete.items() if options}
    methods = {n: place for n, place in recipe.methods.items() if n in (recipe.algorithm, *options)}  # others: no part
    recipe = replace(recipe, algorithms=options, methods=methods)
    check_beforehand(recipe)
    return recipe


def with_short_forms(table: Table) -> Table:
    """The table with what stands for more written out.

    ``algorithm = "method.py:mine"`` is the algorithm ``mine``, and ``methods`` says where it is. In ``data``, ``central
    = "lab.npz"`` is what is in that file. Examples of files, or of a source of the user's own, that are not dealt to a
    number of clients belong to the clients that they come from.
    """
    if is_own(table.get("algorithm")):
        table, (name,) = with_methods(table, [table["algorithm"]])
        table = table | {"algorithm": name}
    data = table.get("data")
    if not isinstance(data, dict):
        return table
    if isinstance(data.get("central"), str):
        data = data | {"central": {"kind": "file", "file": data["central"]}}
    dealt = data.get("partition", {})
    if _is_of_user(data.get("source")) and isinstance(dealt, dict) and not dealt.keys() & {"kind", "clients"}:
        data = data | {"partition": {"kind": "natural"} | dealt}
    return table | {"data": data}


def _with_lengths(table: Table) -> Table:
    """The table of examples of the user's own in which training has a length: one epoch, unless it is said."""
    if not isinstance(table.get("data"), dict) or not _is_of_user(table["data"].get("source")):
        return table
    return table | {name: _once(table.get(name, {})) for name in ("client", "central")}


def _once(training: Any) -> Any:
    silent = isinstance(training, dict) and not training.keys() & {"steps", "epochs"}
    return training | {"epochs": 1} if silent else training


def _is_of_user(source: Any) -> bool:
    return source == "files" or is_own(source)


def _named(name: str, known: Iterable[str], key: str, home: str) -> None:
    """Refuses a name that is neither a known one nor that of something of the user's own."""
    if is_own(name):
        own.load_function(name, home, key)
    else:
        _schema.one_of(name, known, key)


def _finder(table: Table) -> _schema.Own:
    home = _schema.check(table.get("home", ""), str, "home")
    if "\0" in home:
        raise InputError("'home' is the name of a folder, and no folder has a zero byte in its name.")
    return lambda name, key: own.find(name, home, key)


def load(recipe: str, above: tuple[str, ...] = ()) -> Table:
    """The table of a packaged recipe by its name, or of a TOML file by its path.

    One with a ``base`` has the settings of that recipe and its own over them; a paper's figures are not inherited.
    ``above`` are the recipes that have this one as their base.
    """
    if recipe in above:
        raise InputError(f"The recipe '{recipe}' cannot be the base of itself.")
    given = with_short_forms(recipe_table(recipe))
    base = given.pop("base", None)
    if base is None:
        return given
    whole = load(_schema.check(base, str, "base"), (*above, recipe))
    table = {key: value for key, value in whole.items() if key not in ("paper", "published")}
    for parts, value in leaves(given):
        set_key(table, parts, value)
    return table


def chosen(table: Table, algorithm: Any) -> Table:
    """The table with the settings under ``for.<algorithm>`` in their places, and none for other algorithms."""
    table = copy.deepcopy(table)
    table.pop("tune", None)
    name = _schema.check(algorithm, str, "algorithm")
    for parts, value in leaves(by_algorithm(table.pop("for", {}), "for", table).get(name, {})):
        set_key(table, parts, value)
    return table


def by_algorithm(given: Any, key: str, table: Table) -> dict[str, Table]:
    """A part of a recipe (whose whole is ``table``) that has a table for each of some algorithms."""
    tables: dict[str, Table] = _schema.check(given, dict[str, dict[str, Any]], key)
    for name in tables:
        find_algorithm(name, table)
    return tables


def with_tuned(table: Table, file: Path) -> Table:
    """The table with the settings for algorithms that a file of ``mixfed tune`` has, over the recipe's own."""
    what = f"The file of tuned settings {file}"
    given = parse(read_text(file, what), what)
    if set(given) != {"for"}:
        raise InputError(f"{file} is not a file of tuned settings, which has tables [for.ALGORITHM…] only.")
    table = copy.deepcopy(table)
    for parts, value in leaves(by_algorithm(given["for"], "for", table)):
        set_key(table, ["for", *parts], value)
    return table


def leaves(table: Table, path: tuple[str, ...] = ()) -> Iterator[tuple[list[str], Any]]:
    """The values of nested tables, each with its path."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield [*path, key], value


def override(table: Table, settings: Iterable[str]) -> Table:
    """The table with ``a.b=value`` settings applied; a value is read as TOML, or else taken as text.

    Where a setting makes another choice (another optimizer, network or partitioner), the options of the former
    choice that the new one does not have go with it.
    """
    table = copy.deepcopy(table)
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            told = shortened(setting)
            raise InputError(f"A setting is written key=value, such as client.learning_rate=0.1, not '{told}'.")
        if len(parts) > DEEPEST:
            raise InputError(f"There is no setting '{shortened(key)}'; no key has so many parts.")
        set_key(table, parts, value_of(text.strip()))
    return table


def set_key(table: Table, parts: list[str], value: Any) -> None:
    """Sets one dotted key."""
    node = table
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise InputError(f"'{part}' in '{'.'.join(parts)}' is a single value, not a section of the recipe.")
    old = node.get(parts[-1])
    node[parts[-1]] = value
    _schema.drop_stale(Recipe, table, parts, old, _finder(table))
