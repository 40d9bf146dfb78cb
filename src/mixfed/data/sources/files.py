"""Files of the user's own: clients, centre and test from .npz, CSV, Parquet, Arrow or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays, Prepare, as_keys
from mixfed.data._files import require_fields
from mixfed.data.columns import KINDS, Columns, column_names, is_dataset, kind_of, read_columns
from mixfed.data.encoding import CHARACTERS, Encoding, Labels, learn, pieces
from mixfed.data.prepare import Pixels
from mixfed.data.sources.base import Examples, Source
from mixfed.errors import InputError

DESCRIPTION = "files of your own: .npz, CSV, Parquet, Arrow or a Hugging Face folder; see docs/own-data.md"
OBTAIN = "you"
REST = "*"
"""In place of columns: all that are not otherwise used."""
FOR_X = ("X", "features", "feature", "inputs", "input")
"""What users call the features, which are x here."""
OF_PANDAS = "__index_level_"
"""How pandas calls row numbers that it writes into a file."""
Missing = Literal["refuse", "drop"]
Normalise = Literal["auto", "none", "standard"]


def load(
    folder: Path | None = None,
    clients: str = "",
    client: str = "",
    fields: Mapping[str, Any] | None = None,
    test: str = "",
    labels: Labels = "auto",
    normalise: Normalise = "auto",
    missing: Missing = "refuse",
    text: str = "",
    length: int = 100,
    centre: str = "",
) -> Source:
    """``clients``, ``centre`` and ``test`` are paths in the folder: of a file, a folder of files, or a pattern.

    ``client`` is the column with the clients' keys; without it each of several files is a client, and the examples of a
    single file have to be dealt. ``fields`` says which columns are what: ``{x = ["age", "job"], y = "income"}``, or
    ``"*"`` for all others. Words among the features are one-hot, and words among the ``labels`` are classes; whole
    numbers are classes as they are, unless ``labels`` says that they are to be numbered anew ("classes"), or are
    measurements ("numbers", or "standard": with mean 0 and deviation 1). ``normalise`` brings features that are columns
    of numbers ("auto") or all features ("standard") to mean 0 and deviation 1. Examples with a ``missing`` value are
    refused or dropped. ``text`` reads a column of texts as numbers, by "characters" or by a tokenizer's file, so many
    of them as ``length`` says; without a field ``y`` the next one is what is learnt.
    """
    place = Path(folder or ".")
    if not clients:
        raise InputError("the source 'files' needs the file with the clients' examples; name it in clients")
    paths = {"examples of clients": clients, "central examples": centre, "test examples": test}
    files = {whose: files_at(place, path) for whose, path in paths.items() if path}
    first = files["examples of clients"][0]
    if client:
        require_fields(first, [client], column_names(first))
    chosen = columns_of(first, fields, client, bool(text))
    tables = {whose: _read(found, chosen, client, missing) for whose, found in files.items()}
    training = [table for whose, table in tables.items() if whose != "test examples"]
    tokens = str(place / text) if text and text != CHARACTERS else text
    encoding = learn([table.columns for table in training], chosen, labels, tokens, length)
    found = {whose: _examples(encoding, table, whose) for whose, table in tables.items()}
    train = found["examples of clients"]
    empty = Examples({name: x[:0] for name, x in train.arrays.items()}, None)
    return Source(
        train=train.arrays,
        test=found.get("test examples", empty).arrays,
        prepare=_prepare(train.arrays),
        classes=_classes(encoding, list(found.values())),
        natural_clients=None if train.people is None else {"train": train.people, "test": train.people[:0]},
        description=DESCRIPTION,
        licence="your own",
        names={"y": encoding.classes} if encoding.classes else {},
        centre=found.get("central examples"),
        vocabulary=encoding.vocabulary,
        encoding=encoding,
        scaled=_scaled(encoding, training[0].columns, train.arrays, normalise),
    )


@dataclass(frozen=True)
class Table:
    """The columns of one or several files, and whose each row is."""

    columns: Columns
    people: NDArray[Any] | None


def files_at(place: Path, path: str) -> list[Path]:
    """The files that a path (a file, a folder or a pattern) stands for, in the order of their names."""
    whole = place / path
    if whole.is_file() or is_dataset(whole):
        return [whole]
    matching = [] if "\0" in path else [Path(name) for name in glob(str(whole))]
    inside = sorted(whole.iterdir() if whole.is_dir() else matching)
    found = [file for file in inside if is_dataset(file) or (file.is_file() and kind_of(file))]
    if not found and whole.is_dir():
        raise InputError(f"the folder '{whole}' has no file of a known kind ({', '.join(KINDS)})")
    if not found:
        raise InputError(f"there is no file '{whole}'; paths are looked for in the recipe's folder, or in --data")
    return found


def columns_of(file: Path, fields: Mapping[str, Any] | None, client: str, text: bool) -> dict[str, list[str]]:
    """The columns of each field: as given, or the file's own x and y; the features are all other columns."""
    given = dict(fields or {})
    present = [name for name in column_names(file) if name != client and not name.startswith(OF_PANDAS)]
    for name, columns in given.items():
        listed = columns if isinstance(columns, list) else [columns]
        if not all(isinstance(column, str) for column in listed):
            raise InputError(f"field '{name}' is made of a column or a list of columns, not of {columns!r}")
    called = next((name for name in given if name in FOR_X), None)
    if called and "x" not in given:
        raise InputError(f"the features are called x in fields, and not '{called}'; rename it")
    if "y" not in given and not (text and "x" in given):
        if "y" not in present:
            told = f"'{file}' has no column 'y'; it has {', '.join(present)}"
            raise InputError(f'{told}; say which holds the labels, as in fields = {{ y = "{present[-1]}" }}')
        given["y"] = "y"
    used = {client, *(c for columns in given.values() for c in ([columns] if isinstance(columns, str) else columns))}
    given.setdefault("x", "x" if "x" in present else REST)
    rest = [name for name in present if name not in used]
    chosen = {name: rest if c == REST else [c] if isinstance(c, str) else list(c) for name, c in given.items()}
    if "y" in chosen and chosen["y"][0] in chosen["x"]:
        raise InputError(f"the column '{chosen['y'][0]}' of '{file}' is the label and a feature too; take it out of x")
    for name, columns in chosen.items():
        if not columns:
            raise InputError(f"no column of '{file}' is left for the field '{name}'")
        if name != "x" and len(columns) != 1:
            raise InputError(f"field '{name}' is one column, not {len(columns)}; only x is made of several")
    return chosen


def _read(files: Sequence[Path], fields: Mapping[str, list[str]], client: str, missing: Missing) -> Table:
    """The columns of the fields, and whose each row is: by the column ``client``, or else each of several files'."""
    wanted = list(dict.fromkeys(column for columns in fields.values() for column in columns))
    keys = [client] if client and client in column_names(files[0]) else []
    chosen = list(dict.fromkeys([*wanted, *keys]))
    tables = [read_columns(file, chosen, missing == "drop") for file in files]
    for file, table in zip(files, tables, strict=True):
        _require_rows(file, table, " without a missing value" if missing == "drop" else "")
    columns = _joined(files, tables)
    if client:
        return Table(columns, as_keys(columns[client], f"the clients' keys '{client}'") if keys else None)
    sizes = [len(next(iter(table.values()))) for table in tables]
    stems = np.array([file.name.split(".")[0] for file in files])
    return Table(columns, np.repeat(stems, sizes) if len(files) > 1 else None)


def _require_rows(file: Path, table: Columns, of_which_kind: str) -> None:
    lengths = {name: len(column) if column.ndim else 0 for name, column in table.items()}
    if not lengths or not min(lengths.values()):
        raise InputError(f"'{file}' has no examples{of_which_kind}; leave it out")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise InputError(f"the columns of '{file}' differ in length ({told}); give one row per example in each")


def _joined(files: Sequence[Path], tables: Sequence[Columns]) -> Columns:
    first = tables[0]
    for file, table in zip(files, tables, strict=True):
        require_fields(file, list(first), list(table))
        for name, column in first.items():
            if table[name].shape[1:] != column.shape[1:]:
                shapes = f"the shape {table[name].shape[1:]}, and in '{files[0]}' {column.shape[1:]}"
                raise InputError(f"'{name}' in '{file}' has {shapes}; make them equal")
    return {name: np.concatenate([table[name] for table in tables]) for name in first} if len(tables) > 1 else first


def _examples(encoding: Encoding, table: Table, whose: str) -> Examples:
    if encoding.text and "y" not in encoding.fields:
        texts = encoding.numbers(table.columns[encoding.fields["x"][0]])
        people = np.zeros(len(texts), np.int64) if table.people is None else table.people
        arrays, owners = pieces(texts, people, encoding.length)
        return Examples(arrays, None if table.people is None else owners)
    return Examples(encoding.encode(table.columns, whose), table.people)


def _classes(encoding: Encoding, parts: Sequence[Examples]) -> int | None:
    """How many classes there are, where the labels are classes."""
    if "y" not in encoding.fields:
        return encoding.vocabulary
    if encoding.classes:
        return len(encoding.classes)
    labels = [part.arrays["y"] for part in parts]
    if labels[0].dtype.kind not in "iu" or min(int(y.min()) for y in labels) < 0:
        return None
    return max(int(y.max()) for y in labels) + 1


def _prepare(arrays: Arrays) -> Prepare | None:
    return Pixels() if arrays["x"].dtype == np.uint8 and arrays["x"].ndim == 4 else None


def _scaled(
    encoding: Encoding, columns: Columns, arrays: Arrays, normalise: Normalise
) -> dict[str, NDArray[np.bool_] | None]:
    """What is brought to mean 0 and deviation 1: which numbers of ``x``, and the labels if they are measurements."""
    found: dict[str, NDArray[np.bool_] | None] = {"y": None} if encoding.labels == "standard" else {}
    if arrays["x"].dtype != np.float32 or normalise == "none":
        return found
    of_columns = columns[encoding.fields["x"][0]].ndim == 1
    if of_columns or (normalise == "standard" and arrays["x"].ndim == 2):
        found["x"] = encoding.number_columns(columns) if of_columns else np.ones(arrays["x"].shape[1], np.bool_)
    elif normalise == "standard":
        found["x"] = None
    return found
