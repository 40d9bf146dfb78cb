"""The small Flower app of a federation, for a user to edit: ``mixfed flower init``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import tomli_w

from mixfed.core.files import write_atomically
from mixfed.errors import InputError
from mixfed.experiments import own
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.schema import is_own

_PYPROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "A federation of mixfed: {name}"
dependencies = ["mixfed[flower]"]

[tool.flwr.app]
publisher = "mixfed"

[tool.flwr.app.components]
serverapp = "federation.server_app:app"
clientapp = "federation.client_app:app"

# What 'flwr run --run-config' may say: the folder that the server writes to, whether it goes on with the run that is
# there, and settings over the recipe ("rounds=20 seed=1").
[tool.flwr.app.config]
out = ""
resume = false
set = ""
"""

_SERVER = '''\
"""The server: its own data and its own loop; the recipe is recipe.toml beside this file."""

from pathlib import Path

from mixfed.experiments.federation import server_app

app = server_app(Path(__file__).with_name("recipe.toml"))
'''

_CLIENT = '''\
"""A site. It holds the clients that its node was started with: --node-config 'clients="0-3" folder="private"'.

They have the examples that the recipe deals to them. For examples of your own give ``client_app`` a function:

    def examples(node):
        data = mixfed.FederatedData.from_arrays({"x": ..., "y": ...}, clients=...)
        return data, {}  # and what clients keep apart for evaluations, {"test": ...}

    app = client_app(RECIPE, data=examples, classes=10)
"""

from pathlib import Path

from mixfed.experiments.federation import client_app

RECIPE = Path(__file__).with_name("recipe.toml")

app = client_app(RECIPE)
'''


def write_app(folder: Path, recipe: Recipe, *, travels: bool = True) -> None:
    """Writes the app of a recipe into a folder that is not there yet, or empty.

    An app that ``travels`` takes code of the user's own along; data and weights stay where they are, and the recipe of
    the app says where. One that stays on this machine leaves everything in the recipe's folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already; choose a new folder for the app.")
    name = "".join(sign if sign.isalnum() else "-" for sign in recipe.name.lower()).strip("-") or "federation"
    inside = folder / "federation"
    texts = {
        folder / "pyproject.toml": _PYPROJECT.format(name=name),
        inside / "__init__.py": "",
        inside / "server_app.py": _SERVER,
        inside / "client_app.py": _CLIENT,
        inside / "recipe.toml": tomli_w.dumps(_away_from_home(recipe) if travels else recipe.table()),
    }
    for path, text in texts.items():
        write_atomically(path, text.encode())
    for code in Path(recipe.home).glob("*.py") if recipe.home and travels else []:
        shutil.copy(code, inside / code.name)


def _away_from_home(recipe: Recipe) -> dict[str, Any]:
    """The recipe's table for another folder, which is its home from now on."""
    table = {name: value for name, value in recipe.table().items() if name != "home"}
    reads_files = recipe.data.source == "files" or is_own(recipe.data.source)
    place = recipe.data.folder or (recipe.home if reads_files else "")
    if place:
        table["data"] = table["data"] | {"folder": str(Path(place).resolve())}
    if recipe.model.weights and ":" not in recipe.model.weights:  # else in a package, which all machines have
        weights = own.file_of(recipe.model.weights, recipe.home, "model.weights")
        table["model"] = table["model"] | {"weights": str(weights.resolve())}
    return table
