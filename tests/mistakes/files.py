"""Mistakes with files, code and columns of one's own, made in recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


MISTAKES = [
    Mistake('A file that is not there: `clients = "al.csv"`', recipe({"clients": '"al.csv"'})),
    Mistake('A file of no known kind: `clients = "notes.txt"`', recipe({"clients": '"notes.txt"'})),
    Mistake("A column of clients that the file lacks", recipe({"client": '"whom"'})),
    Mistake("A column of labels that the file lacks", recipe({"fields": '{ x = "size", y = "animals" }'})),
    Mistake("Columns without a word on which holds the labels", recipe({"fields": DROPPED})),
    Mistake("Missing values in a column", recipe({"clients": '"gaps.csv"'})),
    Mistake("A class that only the test file has", recipe({"test": '"others.csv"'})),
    Mistake("Words as measurements", recipe({"labels": '"numbers"'})),
    Mistake("No test examples", recipe({"test": DROPPED})),
    Mistake("A test file, and a share to test on", recipe({"test_share": "0.2"})),
    Mistake("One file, and nothing that says whose its examples are", recipe({"client": DROPPED})),
    Mistake("A tokenizer that is not there", recipe({"fields": '{ x = "colour", y = "animal" }', "text": '"t.json"'})),
    Mistake("Text of two columns", recipe({"text": '"characters"'})),
    Mistake("A file of code that is not there", recipe(model={"name": '"nets.py:Net"'})),
    Mistake("A network that the file lacks", recipe(model={"name": '"net.py:Nets"'})),
    Mistake("Code that fails when it is loaded", recipe(model={"name": '"broken.py:Net"'})),
    Mistake("A network that is made already", recipe(model={"name": '"net.py:ready"'})),
    Mistake("A setting that the network lacks", recipe(model={"widht": "3"})),
    Mistake("A function that makes no network", recipe(model={"name": '"two.py:load"'})),
    Mistake("A pattern that freezes nothing", recipe(model={"frozen": '["bodies.*"]'})),
    Mistake("Weights that are not there", recipe(model={"weights": '"none.pth"'})),
    Mistake("A metric that averages", recipe(above="evaluate.metrics = ['loss', 'mean.py:right']")),
    Mistake("An algorithm with a setting that is not given", recipe(above='algorithm = "method.py:wants_more"')),
    Mistake("An algorithm that returns something else", recipe(above='algorithm = "method.py:none"')),
    Mistake("An algorithm with the name of a packaged one", recipe(above='algorithm = "two.py:fedavg"')),
    Mistake("A source that returns something else", recipe(dict.fromkeys(DATA, DROPPED) | {"source": '"two.py:load"'})),
]
