"""The app of the tests' federation: sites that hold the clients of many experiments, each named after its row of the
table of algorithms, so that one federation serves all of them in turn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mixfed.backends.flower import client_app
from mixfed.backends.parcels import Parcel
from mixfed.backends.site import Holding, Site
from mixfed.evaluate.metrics import metric_sums
from tests.algorithms.test_table import FEDERATED, ROWS

PYPROJECT = """
[project]
name = "many"
version = "1.0.0"
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "many_app:app"
clientapp = "many_app:app"
"""
MODULE = "from tests.flower import many\n\napp = many.app\n"


def write_app(folder: Path) -> Path:
    """The app in a folder, as ``flwr run`` wants it."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "many_app.py").write_text(MODULE)
    return folder


def experiment_of(row: str) -> str:
    """The name of a row as that of an experiment."""
    return "".join(sign if sign.isalnum() else "-" for sign in row)


class Many(Site):
    """A site for every row, made when it is first asked for."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        self.node, self.made = node, dict[str, Site]()

    def answer(self, parcel: Parcel) -> Parcel:
        name = parcel.header["experiment"]
        if name not in self.made:
            row = next(row for row in ROWS if experiment_of(row) == name)
            mine = np.arange(int(self.node["first"]), len(FEDERATED), 4)
            holding = Holding(mine.tolist(), FEDERATED.select(mine), {"test": FEDERATED.select(mine)})
            self.made[name] = Site(
                ROWS[row].make(),
                {"clients": holding},
                name,
                str(self.node["folder"]),
                measure=metric_sums,
                executor="loop",
            )
        return self.made[name].answer(parcel)


app = client_app(lambda node, run: Many(node))
