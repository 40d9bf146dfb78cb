"""A first recipe for files of the user's own: looks at the files and writes a commented recipe that runs as written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import category

import numpy as np

from mixfed.core.files import write_atomically
from mixfed.data.scenario import Scenario
from mixfed.data.sources.files import files_at
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.looking import MOST_CLASSES, Column, Roles, look, roles
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.texts import parse, quoted


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
    columns = look(files)
    found = roles(columns, len(files), [path for path in (central, test) if path], client, label, features)
    told = {"clients": clients, "central": central, "test": test}
    paths = {part: os.path.relpath(path, folder) for part, path in told.items() if path}
    return "\n".join(map(_readable, _Task(columns, found, paths, len(files)).lines())) + "\n"


@dataclass(frozen=True)
class _Task:
    """What was found out, and the recipe that follows from it."""

    columns: Mapping[str, Column]
    roles: Roles
    paths: Mapping[str, str]
    files: int

    @property
    def measured(self) -> bool:
        """Whether labels are measurements, and not classes."""
        y = self.columns[self.roles.y]
        return y.kind == "numbers" or (y.kind == "whole" and y.different > MOST_CLASSES)

    @property
    def people(self) -> int:
        """How many clients there are by nature; 0 where the examples have to be dealt."""
        return self.columns[self.roles.keys].different if self.roles.keys else self.files if self.files > 1 else 0

    def lines(self) -> Iterator[str]:
        """The recipe, line by line."""
        rows = len(self.columns[self.roles.y].values)
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
        y = self.columns[self.roles.y]
        yield "[data]"
        yield 'source = "files"'
        yield f"clients = {quoted(self.paths['clients'])}"
        for column in self.columns.values():
            yield f"# {column.told()}"
        if self.roles.keys:
            yield f"client = {quoted(self.roles.keys)}   # whose an example is: {clients:,} clients"
        elif self.people:
            yield f"# each of {clients:,} files is a client"
        if self.roles.other_keys:
            count = self.columns[self.roles.other_keys].different
            yield f"# client = {quoted(self.roles.other_keys)}   # would make {count:,} clients in their place"
        x = ", ".join(map(quoted, self.roles.x))
        yield f"fields = {{ x = {x if len(self.roles.x) == 1 else f'[{x}]'}, y = {quoted(self.roles.y)} }}"
        if self.roles.left_out:
            yield f"# left out of the features: {', '.join(self.roles.left_out)}"
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
        if any(
            self.columns[n].missing
            for n in [*self.roles.x, self.roles.y, *([self.roles.keys] if self.roles.keys else [])]
        ):
            yield 'missing = "drop"              # examples with a missing value'
        if "central" in self.paths:
            yield f"central = {quoted(self.paths['central'])}"
        if "test" in self.paths:
            yield f"test = {quoted(self.paths['test'])}"
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
        shape = self.columns[self.roles.x[0]].values.shape[1:] if len(self.roles.x) == 1 else ()
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
        return len(self.roles.x) == 1 and self.columns[self.roles.x[0]].kind in ("texts", "words")

    def _is_image(self, shape: tuple[int, ...]) -> bool:
        """Bytes of square images that are large enough to convolve."""
        sides = [size for size in shape if size not in (1, 3)]
        bytes_of_images = self.columns[self.roles.x[0]].values.dtype == np.uint8 and len(shape) in (2, 3)
        return bytes_of_images and len(sides) == 2 and sides[0] == sides[1] >= 10


def _readable(line: str) -> str:
    """A line whose comment may hold anything that a file does: control characters would not be TOML."""
    return "".join(" " if category(letter) == "Cc" and letter != "\t" else letter for letter in line)
