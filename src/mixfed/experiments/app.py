"""The small Flower app of a federation, for a user to edit: ``mixfed flower init``."""

from __future__ import annotations

import shutil
from pathlib import Path

import tomli_w

from mixfed.core.files import write_atomically
from mixfed.errors import InputError
from mixfed.experiments.recipe import Recipe

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


def write_app(folder: Path, recipe: Recipe) -> None:
    """Writes the app of a recipe into a folder that is not there yet, or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already; choose a new folder for the app.")
    name = "".join(sign if sign.isalnum() else "-" for sign in recipe.name.lower()).strip("-") or "federation"
    inside = folder / "federation"
    texts = {
        folder / "pyproject.toml": _PYPROJECT.format(name=name),
        inside / "__init__.py": "",
        inside / "server_app.py": _SERVER,
        inside / "client_app.py": _CLIENT,
        inside / "recipe.toml": tomli_w.dumps({k: v for k, v in recipe.table().items() if k != "home"}),  # now here
    }
    for path, text in texts.items():
        write_atomically(path, text.encode())
    for own in Path(recipe.home).glob("*.py") if recipe.home else []:  # networks and sources of the user's own
        shutil.copy(own, inside / own.name)
