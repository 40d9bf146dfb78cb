"""The texts of recipes and studies, packaged or in files, and TOML as tables.

Nothing here needs PyTorch, so a name that does not exist and a file that is no TOML are refused at once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w

from mixfed.errors import InputError
from mixfed.experiments.schema import Table, nearest, shortened

DEEPEST = 32
"""How deep tables and lists may be nested; a recipe needs five levels."""

DATA = (".csv", ".tsv", ".npz", ".parquet", ".arrow", ".feather")
"""Files that are no recipes, though users may try."""


def packaged(kind: str) -> dict[str, str]:
    """The text of every packaged recipe (``kind`` "recipes"), study ("studies") or experiment ("reproductions")."""
    found = [f for f in files(f"mixfed.experiments.{kind}").iterdir() if f.name.endswith(".toml")]
    return {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in sorted(found, key=lambda f: f.name)}


def recipe_table(recipe: str) -> Table:
    """The table of a packaged recipe by its name, or of a TOML file by its path; its own settings only.

    The folder of a file is the recipe's ``home``, unless it says otherwise.
    """
    known = packaged("recipes")
    name, text = _named(recipe, "recipe", known)
    place = {} if recipe in known else {"home": str(Path(recipe).resolve().parent)}
    return {"name": name} | place | parse(text, f"The recipe '{name}'")


def study_table(study: str) -> tuple[str, Table]:
    """The name and the table of a packaged study by its name, or of a TOML file by its path."""
    name, text = _named(study, "study", packaged("studies"))
    return name, parse(text, f"The study '{name}'")


def reproduction_table(experiment: str) -> tuple[str, Table]:
    """The name and the table of a packaged experiment by its name, or of a TOML file by its path."""
    name, text = _named(experiment, "experiment", packaged("reproductions"))
    return name, parse(text, f"The experiment '{name}'")


def _named(name: str, kind: str, known: Mapping[str, str]) -> tuple[str, str]:
    if name in known:
        return name, known[name]
    path = Path(name)
    if path.suffix != ".toml" and not path.is_file():
        near = nearest(name, list(known))
        raise InputError(
            f"There is no {kind} '{name}'; did you mean '{near}' (all: {', '.join(known)}), or the path of a .toml?"
        )
    if path.suffix in DATA:
        raise InputError(f"'{name}' is a file of examples; mixfed new mine --clients {name} makes a recipe for it.")
    return path.stem, read_text(path, f"The {kind} {path}")


def read_text(path: Path, what: str) -> str:
    """The text of a file of the user's."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise InputError(f"{what} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def parse(text: str, what: str) -> Table:
    """TOML as a table; a sentence about ``what`` where it is none."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise InputError(_TOO_DEEP.format(what)) from None
    except ValueError as error:  # tomllib's own, and numbers of thousands of digits
        raise InputError(f"{what} is not valid TOML: {str(error).rstrip('.')}.") from error
    if _is_deep(table):
        raise InputError(_TOO_DEEP.format(what))
    return table


_TOO_DEEP = "{} is nested too deeply; a recipe has sections within sections, " + f"but not more than {DEEPEST} of them."


def value_of(text: str) -> Any:
    """A value as TOML has it, or else the text itself."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError):
        raise InputError(f"The value '{shortened(text)}' is too long or nested too deeply to be read.") from None
    if _is_deep(table):
        raise InputError(f"The value '{shortened(text)}' is nested too deeply to be read.")
    return table["value"] if set(table) == {"value"} else text


def setting(key: str, value: Any) -> str:
    """A setting as ``--set`` takes it."""
    return f"{key}={quoted(value)}"


def quoted(value: Any) -> str:
    """A value as TOML writes it."""
    return tomli_w.dumps({"value": value}).partition("=")[2].strip()


def _is_deep(value: Any) -> bool:
    """Whether there are more levels than ``DEEPEST``; looked at level by level, so that no depth is too deep."""
    level = [value]
    for _ in range(DEEPEST):
        inner = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        level = [item for items in inner for item in items]
    return bool(level)
