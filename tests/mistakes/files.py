"""Mistakes with files, code and columns of one's own, made in recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.own.code import write_code
from tests.own.tables import table, write

from .table import Mistake, commanded

DATA = {
    "source": '"files"',
    "clients": '"all.csv"',
    "client": '"who"',
    "fields": '{ x = ["size", "colour"], y = "animal" }',
    "test": '"test.csv"',
}
MODEL = {"name": '"net.py:Net"'}
DROPPED = ""


CODE = """from dataclasses import replace

from torch.nn import Linear

from mixfed.algorithms.fedavg import fedavg


def wrong(outputs, batch):
    return outputs[:, 0] / batch["y"].missing


def alone(outputs):
    return outputs[:, 0]


class Deep(Linear):
    def __init__(self, inputs, outputs, depth):
        super().__init__(inputs, outputs)


def failing(trainer):
    return replace(fedavg(trainer, name="failing"), step=lambda state, replies, server: state.moved)


def forgetful(trainer):
    return replace(fedavg(trainer, name="forgetful"), step=lambda state, replies, server: None)
"""


def write_odd_files(folder: Path) -> None:
    """Files that somebody wrote who did not think of us, and code that fails when it is called."""
    rows = list(zip(*table().values(), strict=True))
    (folder / "semicolons.csv").write_text("\n".join(";".join(map(str, row)) for row in [tuple(table()), *rows]))
    (folder / "nameless.csv").write_text("\n".join(",".join(map(str, row)) for row in rows))
    write(folder / "commas.csv", table() | {"size": [str(size).replace(".", ",") for size in table()["size"]]})
    (folder / "nothing.csv").write_text("")
    (folder / "later.py").write_text(CODE)
    for n in range(3):
        np.savez(folder / f"p{n}.npz", x=np.zeros((6, 4 if n == 1 else 3)), y=np.arange(6) % 3)
        hue = "hue" if n == 1 else "colour"
        write(folder / "people" / f"p{n}.csv", {hue if name == "colour" else name: x for name, x in table().items()})
    x, who = np.random.default_rng(0).normal(size=(30, 3)), np.arange(30) % 3
    np.savez(folder / "hot.npz", x=x, who=who, y=np.eye(3)[who])
    np.savez(folder / "signs.npz", x=x, who=who, y=np.sign(x[:, 0]).astype(int))
    np.savez(folder / "objects.npz", x=x, who=who, y=np.array(["cat", "dog", None] * 10))
    np.savez(folder / "short.npz", x=x, who=who, y=who[1:])
    np.save(folder / "alone.npy", x)
    torch.save({"epoch": 3, "model": {}}, folder / "checkpoint.pth")


def recipe(
    data: dict[str, str] | None = None, model: dict[str, str] | None = None, above: str = ""
) -> Callable[[], list[str]]:
    """A run of a recipe in which one thing is changed, beside files that are as they should be."""

    def make() -> list[str]:
        folder = Path.cwd()
        write_code(folder)
        for name, seed in (("all.csv", 0), ("lab.csv", 1), ("test.csv", 2)):
            write(folder / name, table(seed=seed))
        write(folder / "gaps.csv", table() | {"size": [None, None, *table()["size"][2:]]})
        write(folder / "others.csv", table() | {"animal": ["yak", *table()["animal"][1:]]})
        write_odd_files(folder)
        (folder / "notes.txt").write_text("notes")
        (folder / "broken.py").write_text("import torch\n\nwidth = torch.zeros(3).shape[7]\n")
        (folder / "mean.py").write_text("def right(outputs, batch):\n    return outputs.mean()\n")
        (folder / "two.py").write_text("def fedavg(trainer):\n    pass\n\n\ndef load():\n    return [1, 2]\n")
        sections = {"data": DATA | (data or {}), "model": MODEL | (model or {})}
        lines = [above, "rounds = 1", "cohort = 2"]
        for name, keys in sections.items():
            lines += [f"[{name}]", *(f"{key} = {value}" for key, value in keys.items() if value != DROPPED)]
        (folder / "mine.toml").write_text("\n".join([*lines, "[client]", "epochs = 1", ""]))
        return commanded("run", "mine.toml", "--executor", "loop")()

    return make


ARRAYS = {"fields": DROPPED, "test": DROPPED, "test_share": "0.2"}
"""For a file with fields x and y."""

TEXT = {"fields": '{ x = "colour", y = "animal" }', "text": '"characters"', "length": "6"}
"""The colours, letter by letter."""

MISTAKES = [
    Mistake('A file that is not there: `clients = "al.csv"`', recipe({"clients": '"al.csv"'})),
    Mistake('A file of no known kind: `clients = "notes.txt"`', recipe({"clients": '"notes.txt"'})),
    Mistake("A column of clients that the file lacks", recipe({"client": '"whom"'})),
    Mistake("A column of labels that the file lacks", recipe({"fields": '{ x = "size", y = "animals" }'})),
    Mistake("Columns without a word on which holds the labels", recipe({"fields": DROPPED})),
    Mistake("Missing values in a column", recipe({"clients": '"gaps.csv"'})),
    Mistake("A class that only the test file has", recipe({"test": '"others.csv"'})),
    Mistake("Words as measurements", recipe({"labels": '"numbers"'})),
    Mistake("Words, and a criterion for measurements", recipe(model={"criterion": '"squared_error"'})),
    Mistake("No test examples", recipe({"test": DROPPED})),
    Mistake("A test file, and a share to test on", recipe({"test_share": "0.2"})),
    Mistake("One file, and nothing that says whose its examples are", recipe({"client": DROPPED})),
    Mistake("A tokenizer that is not there", recipe({"fields": '{ x = "colour", y = "animal" }', "text": '"t.json"'})),
    Mistake("Text for a network that takes measurements", recipe(TEXT, {"name": '"mlp"'})),
    Mistake("Text for a network that takes images", recipe(TEXT, {"name": '"cnn"'})),
    Mistake("Labels of texts, and a network that answers at every position", recipe(TEXT, {"name": '"gru"'})),
    Mistake("Text of two columns", recipe({"text": '"characters"'})),
    Mistake("Semicolons between the columns", recipe({"clients": '"semicolons.csv"'})),
    Mistake("A CSV file without a line of names", recipe({"clients": '"nameless.csv"'})),
    Mistake("Numbers with a decimal comma", recipe({"clients": '"commas.csv"'})),
    Mistake("An empty file", recipe({"clients": '"nothing.csv"'})),
    Mistake('A single array: `clients = "alone.npy"`', recipe({"clients": '"alone.npy"'})),
    Mistake("Python objects in an .npz", recipe(ARRAYS | {"clients": '"objects.npz"'})),
    Mistake("Fewer labels than examples in an .npz", recipe(ARRAYS | {"clients": '"short.npz"'})),
    Mistake("One-hot labels in a file", recipe(ARRAYS | {"clients": '"hot.npz"'})),
    Mistake("Labels -1 and 1 in a file", recipe(ARRAYS | {"clients": '"signs.npz"'})),
    Mistake("A client's file that lacks a column", recipe({"clients": '"people"', "client": DROPPED})),
    Mistake("A client's file with wider arrays", recipe(ARRAYS | {"clients": '"p?.npz"', "client": DROPPED})),
    Mistake("The label among the features", recipe({"fields": '{ x = ["size", "animal"], y = "animal" }'})),
    Mistake("Features by another name than x", recipe({"fields": '{ features = "size", y = "animal" }'})),
    Mistake("A method for the centre, and nothing there", recipe(above='algorithm = "parallel"')),
    Mistake("A file of code that is not there", recipe(model={"name": '"nets.py:Net"'})),
    Mistake("A file in place of the network in it", recipe(model={"name": '"net.py"'})),
    Mistake("A network that the file lacks", recipe(model={"name": '"net.py:Nets"'})),
    Mistake("Code that fails when it is loaded", recipe(model={"name": '"broken.py:Net"'})),
    Mistake("A network that is made already", recipe(model={"name": '"net.py:ready"'})),
    Mistake("A setting that the network lacks", recipe(model={"widht": "3"})),
    Mistake("A function that makes no network", recipe(model={"name": '"two.py:load"'})),
    Mistake("A pattern that freezes nothing", recipe(model={"frozen": '["bodies.*"]'})),
    Mistake("Weights that are not there", recipe(model={"weights": '"none.pth"'})),
    Mistake("Weights inside of a checkpoint", recipe(model={"weights": '"checkpoint.pth"'})),
    Mistake("A network with a setting that is not given", recipe(model={"name": '"later.py:Deep"'})),
    Mistake("A criterion that does not take the batch", recipe(model={"criterion": '"later.py:alone"'})),
    Mistake("A criterion that fails", recipe(model={"criterion": '"later.py:wrong"'})),
    Mistake("A metric that averages", recipe(above="evaluate.metrics = ['loss', 'mean.py:right']")),
    Mistake("A file in place of an algorithm in it", recipe(above='algorithm = "method.py"')),
    Mistake("An algorithm with a setting that is not given", recipe(above='algorithm = "method.py:wants_more"')),
    Mistake("An algorithm that returns something else", recipe(above='algorithm = "method.py:none"')),
    Mistake("An algorithm that fails in a round", recipe(above='algorithm = "later.py:failing"')),
    Mistake("An algorithm whose step returns nothing", recipe(above='algorithm = "later.py:forgetful"')),
    Mistake("An algorithm with the name of a packaged one", recipe(above='algorithm = "two.py:fedavg"')),
    Mistake("A source that returns something else", recipe(dict.fromkeys(DATA, DROPPED) | {"source": '"two.py:load"'})),
]
