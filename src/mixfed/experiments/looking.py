"""What is in files of the user's own: the kind of every column, and which is the label, the key, or to learn from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.data.columns import whole_columns
from mixfed.data.sources.files import OF_PANDAS, files_at
from mixfed.errors import InputError
from mixfed.experiments.schema import nearest

LABELS = ("y", "label", "labels", "target", "class", "outcome", "activity", "category")
CLIENTS = (
    *("client", "client_id", "user", "user_id", "person", "subject", "patient", "writer", "author", "speaker", "who"),
    *("device", "device_id", "site", "hospital", "station", "customer", "customer_id"),
)
MOST_CLASSES, MOST_WORDS, LONG_TEXT = 100, 100, 30
KEYS = ("whole", "words")


@dataclass(frozen=True)
class Column:
    """What a column holds in all files: ``whole`` numbers, other ``numbers``, ``words``, ``texts``, ``arrays``, …

    ``values`` are those that are not missing (of arrays: those of the first file), and ``each`` is how many different
    ones every file has.
    """

    name: str
    kind: str
    different: int
    rows: int
    missing: int
    values: NDArray[Any]
    each: Sequence[int] = ()

    @property
    def is_key(self) -> bool:
        """Whether it numbers or names the rows, so that nothing can be learnt from it."""
        names = self.kind in (*KEYS, "texts") and self.values.dtype.kind != "f"
        return names and self.different == self.rows - self.missing > 20

    @property
    def names_files(self) -> bool:
        """Whether every file has one value of its own: the column says whose file it is."""
        return self.kind in KEYS and 1 < len(self.each) == sum(self.each) == self.different

    @property
    def is_spread(self) -> bool:
        """Whether values of one file are in another one too."""
        return sum(self.each) > self.different

    def told(self) -> str:
        """The column in a comment."""
        shape = f" {list(self.values.shape[1:])}" if self.kind == "arrays" else ""
        gaps = f", {self.missing:,} missing" if self.missing else ""
        return f"{self.name} ({self.kind}{shape}, {self.different:,} different{gaps})"


def look(files: Sequence[Path]) -> dict[str, Column]:
    """Every column that all the files have, with one value or array for each example."""
    tables = [whole_columns(file) for file in files]
    everywhere = [name for name in tables[0] if all(name in table for table in tables)]
    found = {name: _column(name, [table[name] for table in tables]) for name in everywhere}
    if not found:
        raise InputError(f"'{files[0]}' and what is beside it have no column in common.")
    ((rows, _),) = Counter(column.rows for column in found.values()).most_common(1)
    return {n: column for n, column in found.items() if not n.startswith(OF_PANDAS) and column.rows == rows}


@dataclass(frozen=True)
class Roles:
    """Which column is what: the clients' ``keys`` (or None), the features ``x`` and the label ``y``.

    ``left_out`` are other columns with the reason, and ``other_keys`` would be the keys if files were not.
    """

    keys: str | None
    x: list[str]
    y: str
    left_out: list[str]
    other_keys: str | None = None


def roles(
    columns: Mapping[str, Column],
    files: int,
    others: Sequence[str],
    client: str | None,
    label: str | None,
    features: Sequence[str],
) -> Roles:
    """What is what: as the user says, or as names and values tell. ``others`` are files of the centre and the test."""
    elsewhere = [set(look(files_at(Path(), path))) for path in others]
    keys, other_keys = _keys(columns, files, elsewhere, client)
    shared = {n: c for n, c in columns.items() if all(n in names for names in elsewhere)}
    rest = {n: column for n, column in columns.items() if n not in (keys, other_keys)}
    common = {n: column for n, column in rest.items() if n in shared}
    y = _named(rest, label, "--label") if label else _usual(common, LABELS) or _last_that_can_be_learnt(common)
    if columns[y].kind == "arrays":
        shape = list(columns[y].values.shape[1:])
        told = f"The labels '{y}' hold an array {shape} for each example, where one value is learnt"
        raise InputError(f"{told}; of one-hot labels save the argmax, or name another column with --label.")
    if features:
        return Roles(keys, [_named(rest, name, "--features") for name in features], y, [], other_keys)
    x, left_out = _features(common, y)
    lacking = [f"{name} (not in all files)" for name in rest if name not in common and name != y]
    whose = [f"{other_keys} (says whose an example is)"] if other_keys else []
    return Roles(keys, x, y, [*left_out, *lacking, *whose], other_keys)


def _keys(
    columns: Mapping[str, Column], files: int, elsewhere: Sequence[set[str]], client: str | None
) -> tuple[str | None, str | None]:
    """The column with the clients' keys; of several files each is a client, unless people are in more than one."""
    if client:
        return _named(columns, client, "--client"), None
    usual = _usual({n: c for n, c in columns.items() if c.kind in KEYS}, CLIENTS)
    if files == 1:
        return usual or _only_here(columns, elsewhere), None
    return (usual, None) if usual and columns[usual].is_spread else (None, usual)


def _only_here(columns: Mapping[str, Column], elsewhere: Sequence[set[str]]) -> str | None:
    """The one column of words or whole numbers that no other file has: it says whose an example is."""
    known = set[str]().union(*elsewhere)
    left = [column for name, column in columns.items() if name not in known] if elsewhere else []
    repeats = [column.name for column in left if column.kind in KEYS and not column.is_key]
    return repeats[0] if len(left) == len(repeats) == 1 else None


def _usual(columns: Mapping[str, Column], usual: Sequence[str]) -> str | None:
    """The column with one of the usual names."""
    lower = {re.sub(r"\W+", "_", name.lower()).removesuffix("_name"): name for name in columns}
    return next((lower[name] for name in usual if name in lower), None)


def _named(columns: Mapping[str, Column], name: str, option: str) -> str:
    if name not in columns:
        near = nearest(name, list(columns))
        raise InputError(f"{option} names a column, and there is no '{name}'; did you mean '{near}'?")
    return name


def _last_that_can_be_learnt(columns: Mapping[str, Column]) -> str:
    fit = [name for name, column in columns.items() if column.kind != "arrays" and not _why_not(column)]
    if not fit:
        told = ", ".join(column.told() for column in columns.values())
        raise InputError(f"No column looks like what is to be learnt ({told}); name it with --label.")
    return fit[-1]


def _features(columns: Mapping[str, Column], y: str) -> tuple[list[str], list[str]]:
    """The columns to learn from, and those that are left out with the reason."""
    others = {name: column for name, column in columns.items() if name != y}
    if not others:
        raise InputError(f"There is no column but '{y}' in all files, so there is nothing to learn from.")
    arrays = [name for name, column in others.items() if column.kind == "arrays"]
    if arrays:
        largest = max(arrays, key=lambda name: columns[name].values[0].size)
        return [largest], [f"{name} (beside arrays)" for name in others if name != largest]
    reasons = {name: _why_not(column) for name, column in others.items()}
    kept = [name for name, why in reasons.items() if not why]
    if not kept:
        texts = [name for name in others if columns[name].kind == "texts"]
        kept = [max(texts, key=lambda name: columns[name].different)] if texts else list(others)
    return kept, [f"{name} ({reasons[name]})" for name in others if name not in kept]


def _why_not(column: Column) -> str:
    if 2 * column.missing >= column.rows:
        return "mostly missing"
    if column.kind == "texts":
        return 'texts; to learn from them set x to this column and text = "characters"'
    if column.kind == "dates":
        return "dates; to learn from them save numbers, such as the day of the year"
    if column.is_key:
        return "another value in every row"
    if column.names_files:
        return "another value in every file"
    if column.kind == "words" and column.different > MOST_WORDS:
        return f"{column.different:,} different words; to learn from their letters use --features {column.name}"
    return "the same in all rows" if column.different == 1 else ""


def _column(name: str, found: Sequence[tuple[NDArray[Any], int]]) -> Column:
    missing = sum(count for _, count in found)
    rows = missing + sum(len(values) for values, _ in found)
    parts = [values.reshape(len(values)) if values.shape[1:] == (1,) else values for values, _ in found]
    if parts[0].ndim > 1:
        return Column(name, "arrays", rows - missing, rows, missing, parts[0])
    values = np.concatenate([part for part in parts if len(part)] or parts)
    each = [len(np.unique(_plain(part))) for part in parts]
    return Column(name, _kind(values), len(np.unique(_plain(values))), rows, missing, values, each)


def _kind(values: NDArray[Any]) -> str:
    match values.dtype.kind:
        case "O" | "U" | "S" | "T":
            length = float(np.mean([len(str(value)) for value in values[:1000]])) if len(values) else 0.0
            return "texts" if length > LONG_TEXT else "words"
        case "M" | "m":
            return "dates"
        case "f":
            classes = np.unique(values)
            return "whole" if len(classes) <= MOST_CLASSES and np.array_equal(classes, np.rint(classes)) else "numbers"
    return "whole"


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.str_) if values.dtype.kind in "OST" else values
