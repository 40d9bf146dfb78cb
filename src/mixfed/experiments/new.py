"""A first recipe for files of the user's own: looks at the files and writes a commented recipe that runs as written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.core.files import write_atomically
from mixfed.data.columns import whole_columns
from mixfed.data.scenario import Scenario
from mixfed.data.sources.files import OF_PANDAS, files_at
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.schema import nearest
from mixfed.experiments.texts import parse

LABELS = ("y", "label", "labels", "target", "class", "outcome", "activity", "category")
CLIENTS = (
    *("client", "client_id", "user", "user_id", "person", "subject", "patient", "writer", "author", "speaker", "who"),
    *("device", "device_id", "site", "hospital", "station", "customer", "customer_id"),
)
MOST_CLASSES, MOST_WORDS, LONG_TEXT = 100, 100, 30


@dataclass(frozen=True)
class Column:
    """What a column holds: ``whole`` numbers, other ``numbers``, ``words``, long ``texts`` or ``arrays``."""

    name: str
    kind: str
    different: int
    missing: int
    values: NDArray[Any]

    @property
    def is_key(self) -> bool:
        """Whether it numbers or names the rows, so that nothing can be learnt from it."""
        return self.kind in ("whole", "words", "texts") and self.different == len(self.values) > 20

    def told(self) -> str:
        """The column in a comment."""
        shape = f" {list(self.values.shape[1:])}" if self.kind == "arrays" else ""
        gaps = f", {self.missing:,} missing" if self.missing else ""
        return f"{self.name} ({self.kind}{shape}, {self.different:,} different{gaps})"


def look(file: Path) -> dict[str, Column]:
    """Every column of a file."""
    found = {name: _column(name, values, missing) for name, (values, missing) in whole_columns(file).items()}
    return {name: column for name, column in found.items() if not name.startswith(OF_PANDAS)}


def new_recipe(
    name: str,
    clients: str,
    central: str | None = None,
    test: str | None = None,
    client: str | None = None,
    label: str | None = None,
    features: Sequence[str] = (),
) -> tuple[Path, Recipe, Scenario]:
    """Writes a recipe for the files: where it is, what it comes to, and who holds what.

    ``client``, ``label`` and ``features`` are the columns with the clients' keys, with the labels and to learn from,
    where their names and values do not tell.
    """
    file = Path(name if name.endswith(".toml") else f"{name}.toml")
    if file.exists():
        raise InputError(f"{file} exists; choose another name, or remove it.")
    if not file.resolve().parent.is_dir():
        raise InputError(f"There is no folder {file.resolve().parent} for the recipe; make it first.")
    text = recipe_text(file.resolve().parent, clients, central, test, client, label, features)
    recipe = toml.resolve({"name": file.stem, "home": str(file.resolve().parent)} | parse(text, "The new recipe"))
    scenario = build_scenario(recipe)
    write_atomically(file, text.encode())
    return file, recipe, scenario


def recipe_text(
    folder: Path,
    clients: str,
    central: str | None,
    test: str | None,
    client: str | None,
    label: str | None,
    features: Sequence[str],
) -> str:
    """The text of a recipe in the folder for the files, which are looked for from here."""
    files = files_at(Path(), clients)
    columns = look(files[0])
    keys = _chosen(columns, client, CLIENTS, "--client") if client or len(files) == 1 else None
    if keys is None and len(files) == 1:
        keys = _only_here(columns, [path for path in (central, test) if path])
    rest = {n: column for n, column in columns.items() if n != keys}
    y = _chosen(rest, label, LABELS, "--label") or list(rest)[-1]
    x, left_out = _features(rest, y)
    if features:
        x, left_out = [_named(rest, name, "--features") for name in features], []
    told = {"clients": clients, "central": central, "test": test}
    paths = {part: os.path.relpath(path, folder) for part, path in told.items() if path}
    task = _Task(columns, keys, x, y, paths, left_out, len(files))
    return "\n".join(task.lines()) + "\n"


@dataclass(frozen=True)
class _Task:
    """What was found out, and the recipe that follows from it."""

    columns: Mapping[str, Column]
    keys: str | None
    x: Sequence[str]
    y: str
    paths: Mapping[str, str]
    left_out: Sequence[str]
    files: int

    @property
    def measured(self) -> bool:
        """Whether labels are measurements, and not classes."""
        y = self.columns[self.y]
        return y.kind == "numbers" or (y.kind == "whole" and y.different > MOST_CLASSES)

    @property
    def people(self) -> int:
        """How many clients there are by nature; 0 where the examples have to be dealt."""
        return self.columns[self.keys].different if self.keys else self.files if self.files > 1 else 0

    def lines(self) -> Iterator[str]:
        """The recipe, line by line."""
        rows = len(self.columns[self.y].values)
        clients = self.people or min(50, max(2, rows // 50))
        yield "# Every line can be changed, and what is left out has a default (see docs/recipes.md)."
        yield 'algorithm = "fedavg"          # mixfed list names the others; with data at the centre try gradient_2way'
        yield "rounds = 100"
        yield f"cohort = {min(10, max(1, clients // 2)):<20} # clients in a round, of {clients:,}"
        yield ""
        yield from self._data(clients)
        yield ""
        yield from self._model()
        yield ""
        yield from self._training()

    def _data(self, clients: int) -> Iterator[str]:
        y = self.columns[self.y]
        yield "[data]"
        yield 'source = "files"'
        yield f"clients = {json.dumps(self.paths['clients'])}"
        for column in self.columns.values():
            yield f"# {column.told()}"
        if self.keys:
            yield f"client = {json.dumps(self.keys)}   # whose an example is: {clients:,} clients"
        elif self.people:
            yield f"# each of {clients:,} files is a client"
        x = json.dumps(self.x[0] if len(self.x) == 1 else list(self.x), ensure_ascii=False)
        yield f"fields = {{ x = {x}, y = {json.dumps(self.y, ensure_ascii=False)} }}"
        if self.left_out:
            yield f"# left out of the features: {', '.join(self.left_out)}"
        if self._is_text():
            yield 'text = "characters"           # or the path of a tokenizer.json'
            yield "length = 100                  # characters that are kept of a text"
        if self.measured:
            yield 'labels = "standard"           # measurements, brought to mean 0 and deviation 1'
        elif y.kind == "whole":
            yield f'labels = "classes"            # {y.different} of them, numbered from 0 in their order'
        else:
            words = ", ".join(map(str, np.unique(y.values)[:8])) + (", …" if y.different > 8 else "")
            yield f"# {y.different} classes: {words}"
        if any(self.columns[n].missing for n in [*self.x, self.y, *([self.keys] if self.keys else [])]):
            yield 'missing = "drop"              # examples with a missing value'
        if "central" in self.paths:
            yield f"central = {json.dumps(self.paths['central'])}"
        if "test" in self.paths:
            yield f"test = {json.dumps(self.paths['test'])}"
        else:
            yield "test_share = 0.2              # of the examples; held_out = 0.2 would test on other people"
        yield "validation = 0.1              # of the rest, kept apart to tune and to advise on"
        if not self.people:
            yield ""
            yield "[data.partition]              # no column says whose an example is, so they are dealt"
            yield 'kind = "iid"                  # or dirichlet with alpha = 0.5: clients that differ in their labels'
            yield f"clients = {clients}"
        if "central" not in self.paths:
            yield ""
            yield "# [data.central]              # what the server holds: nothing so far"
            yield '# kind = "fraction"'
            yield "# fraction = 0.1"

    def _model(self) -> Iterator[str]:
        shape = self.columns[self.x[0]].values.shape[1:] if len(self.x) == 1 else ()
        yield '[model]                       # or a network of your own: name = "net.py:Net"'
        if self._is_text():
            yield 'name = "bilstm"'
            yield "width = 32"
            yield "dense = [64]"
        elif self._is_image(shape):
            yield 'name = "cnn"'
        else:
            yield 'name = "mlp"'
            yield "hidden = [64]"
        if self.measured:
            yield 'criterion = "squared_error"'

    def _training(self) -> Iterator[str]:
        rate = ('optimizer = "adam"', "learning_rate = 0.003") if self._is_text() else ("learning_rate = 0.05",)
        yield "[client]                      # training on clients"
        yield from rate
        yield "batch_size = 20"
        yield "epochs = 1"
        yield ""
        yield "[central]                     # training at the centre, for methods that do"
        yield from rate
        yield "batch_size = 20"
        yield "steps = 10"
        yield ""
        yield "[evaluate]"
        yield "every = 5"
        yield f"metrics = {json.dumps(['loss'] if self.measured else ['loss', 'accuracy'])}"

    def _is_text(self) -> bool:
        return len(self.x) == 1 and self.columns[self.x[0]].kind in ("texts", "words")

    def _is_image(self, shape: tuple[int, ...]) -> bool:
        """Bytes of square images that are large enough to convolve."""
        sides = [size for size in shape if size not in (1, 3)]
        bytes_of_images = self.columns[self.x[0]].values.dtype == np.uint8 and len(shape) in (2, 3)
        return bytes_of_images and len(sides) == 2 and sides[0] == sides[1] >= 10


def _column(name: str, values: NDArray[Any], missing: int) -> Column:
    if values.ndim > 1:
        return Column(name, "arrays", len(values), missing, values)
    different = len(np.unique(values.astype(np.str_) if values.dtype.kind in "OST" else values))
    if values.dtype.kind in "OUST":
        length = float(np.mean([len(str(value)) for value in values[:1000]])) if len(values) else 0.0
        return Column(name, "texts" if length > LONG_TEXT else "words", different, missing, values)
    whole = values.dtype.kind in "iub"
    return Column(name, "whole" if whole else "numbers", different, missing, values)


def _chosen(columns: Mapping[str, Column], given: str | None, usual: Sequence[str], option: str) -> str | None:
    """The column that the user names, or else one with a usual name."""
    if given is not None:
        return _named(columns, given, option)
    lower = {re.sub(r"\W+", "_", name.lower()).removesuffix("_name"): name for name in columns}
    return next((lower[name] for name in usual if name in lower), None)


def _only_here(columns: Mapping[str, Column], others: Sequence[str]) -> str | None:
    """The one column of words or whole numbers that no other file has: it says whose an example is."""
    known = {name for path in others for name in look(files_at(Path(), path)[0])}
    left = [column for name, column in columns.items() if name not in known] if others else []
    repeats = [column.name for column in left if column.kind in ("words", "whole") and not column.is_key]
    return repeats[0] if len(left) == len(repeats) == 1 else None


def _named(columns: Mapping[str, Column], name: str, option: str) -> str:
    if name not in columns:
        near = nearest(name, list(columns))
        raise InputError(f"{option} names a column, and there is no '{name}'; did you mean '{near}'?")
    return name


def _features(columns: Mapping[str, Column], y: str) -> tuple[list[str], list[str]]:
    """The columns to learn from, and those that are left out with the reason."""
    others = {name: column for name, column in columns.items() if name != y}
    if not others:
        raise InputError("The file has one column only; there is nothing to learn from.")
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
    if not len(column.values) or column.missing > len(column.values):
        return "mostly missing"
    if column.kind == "texts":
        return 'texts; to learn from them set x to this column and text = "characters"'
    if column.is_key:
        return "another value in every row"
    if column.kind == "words" and column.different > MOST_WORDS:
        return f"{column.different:,} different words"
    return "the same in all rows" if column.different == 1 else ""
