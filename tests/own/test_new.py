"""``mixfed new`` looks at files and writes a recipe that runs as written."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixfed.experiments import toml
from mixfed.experiments.build import build
from mixfed.experiments.new import new_recipe
from tests.cli.tools import mixfed, refused
from tests.own.tables import table, write


def pictures(folder: Path) -> dict[str, str]:
    draw = np.random.default_rng(0)
    for name, count in (("phones.npz", 40), ("lab.npz", 20)):
        images = draw.integers(0, 256, (count, 12, 12), np.uint8)
        np.savez(folder / name, image=images, label=np.arange(count) % 4 + 1, user=np.arange(count) % 8)
    return {"clients": "phones.npz", "central": "lab.npz"}


def animals(folder: Path) -> dict[str, str]:
    write(folder / "all.csv", table(rows=120) | {"number": list(range(120)), "always": [1] * 120})
    write(folder / "test.csv", table(seed=1) | {"number": list(range(60)), "always": [1] * 60})
    return {"clients": "all.csv", "test": "test.csv", "label": "animal"}


def measurements(folder: Path) -> dict[str, str]:
    given: dict[str, Any] = {
        "size": table()["size"],
        "colour": table()["colour"],
        "price": [3.5 * n for n in range(60)],
    }
    given["size"][7] = None
    write(folder / "all.parquet", given)
    return {"clients": "all.parquet"}


def sayings(folder: Path) -> dict[str, str]:
    said = [f"number {n} says {'yes, gladly and at once' if n % 2 else 'no, never'} to it" for n in range(40)]
    write(
        folder / "said.parquet",
        {"author": [n % 5 for n in range(40)], "said": said, "label": [n % 2 for n in range(40)]},
    )
    return {"clients": "said.parquet"}


def walks(folder: Path) -> dict[str, str]:
    """No column has the usual name of a key, but only the clients' file says whose a walk is."""
    for name in ("phones.csv", "lab.csv"):
        theirs = {"walker": [f"p{n % 6}" for n in range(60)]} if name == "phones.csv" else {}
        write(folder / name, theirs | {name: x for name, x in table().items() if name in ("size", "colour", "animal")})
    return {"clients": "phones.csv", "central": "lab.csv", "label": "animal"}


def file_per_client(folder: Path) -> dict[str, str]:
    """The label is the first column, and every file alone would mislead: of one class, without gaps, with a number."""
    for n in range(6):
        own = {name: x[10 * n : 10 * n + 10] for name, x in table(seed=n).items()}
        given = {"animal": [["cat", "dog", "owl"][n % 3]] * 10, "who": [f"p{n}"] * 10, "beat": list(range(n, n + 10))}
        write(
            folder / "people" / f"p{n}.csv",
            given | {"size": own["size"], "colour": [None if n else "red", *["blue"] * 9]},
        )
    return {"clients": "people", "label": "animal"}


def signals(folder: Path) -> dict[str, str]:
    """Labels stand before arrays, and are floats of whole numbers in a column; what has another length is no column."""
    draw = np.random.default_rng(0)
    for n in range(4):
        kind = draw.integers(1, 4, (20, 1)).astype(float)
        (folder / "phones").mkdir(exist_ok=True)
        signal = np.where(draw.random((20, 6)) < 0.02, np.nan, draw.normal(size=(20, 6)))
        np.savez(folder / f"phones/p{n}.npz", kind=kind, signal=signal, names=np.array(["a", "b", "c"]))
    return {"clients": "phones/*.npz"}


def shards(folder: Path) -> dict[str, str]:
    """Several files, and people who are in more than one of them."""
    for n in range(3):
        write(folder / "parts" / f"part-{n}.parquet", table(seed=n))
    return {"clients": "parts"}


def visits(folder: Path) -> dict[str, str]:
    """A file per hospital, each with patients of its own, and columns that nothing is learnt from."""
    for n in range(3):
        given = table(seed=n) | {
            "day": np.arange(60).astype("datetime64[D]"),
            "notes": [["a"] * (i % 3) for i in range(60)],
        }
        write(folder / "hospitals" / f"h{n}.parquet", given | {"who": [f"{n}-{who}" for who in given["who"]]})
    write(folder / "test.csv", {name: x for name, x in table(seed=9).items() if name in ("size", "animal")})
    return {"clients": "hospitals", "test": "test.csv"}


def odd_names(folder: Path) -> dict[str, str]:
    """Names and classes with what TOML does not take as it is."""
    given = table()
    given["animal"] = [{"cat": "a\ncat", "dog": 'the "dog"', "owl": "owl 🦉"}[kind] for kind in given["animal"]]
    write(folder / "🦉.parquet", {"who": given["who"], "size\t🦉": given["size"], 'the "kind"': given["animal"]})
    return {"clients": "🦉.parquet"}


FOUND: dict[Callable[[Path], dict[str, str]], dict[str, Any]] = {
    pictures: {"model.name": "cnn", "data.client": "user", "data.fields.y": "label", "data.fields.x": "image"},
    animals: {"model.name": "mlp", "data.client": "who", "data.fields.x": ["size", "colour"], "data.test": "test.csv"},
    measurements: {"data.labels": "standard", "model.criterion": "squared_error", "data.missing": "drop"},
    walks: {"data.client": "walker", "data.fields.x": ["size", "colour"]},
    file_per_client: {"data.fields.x": ["beat", "size", "colour"], "data.missing": "drop", "cohort": 3},
    signals: {"data.fields": {"x": "signal", "y": "kind"}, "data.labels": "classes", "data.missing": "drop"},
    shards: {"data.client": "who", "data.fields.x": ["size", "colour"]},
    visits: {"data.fields": {"x": "size", "y": "animal"}},
    odd_names: {"data.fields": {"x": "size\t🦉", "y": 'the "kind"'}, "data.clients": "🦉.parquet"},
    sayings: {"model.name": "bilstm", "data.text": "characters", "data.client": "author"},
}


@pytest.mark.parametrize("files", FOUND, ids=lambda files: files.__name__)
def test_the_recipe_says_what_is_in_the_files_and_runs(
    files: Callable[[Path], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = files(tmp_path)
    file, recipe, scenario = new_recipe("mine", **given)
    written = tomllib.loads(file.read_text())
    for key, value in FOUND[files].items():
        found: Any = written
        for part in key.split("."):
            found = found[part]
        assert found == value, key
    assert toml.resolve(toml.load("mine.toml")) == recipe
    result = build(toml.resolve(toml.override(toml.load("mine.toml"), ["rounds=2", "simulator.executor=loop"]))).run()
    assert np.isfinite(result.metrics["loss"])
    assert len(scenario.clients) == build(recipe).scenario.clients.clients


def test_the_command_and_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "all.csv", table())
    (tmp_path / "sub").mkdir()
    new = ["new", "sub/mine", "--clients", "all.csv", "--label", "animal"]
    told = mixfed(*new, cwd=tmp_path).stdout
    assert "Learns: animal from size, colour (--label and" in told
    assert "mixfed run sub/mine.toml" in told
    assert 'clients = "../all.csv"' in (tmp_path / "sub/mine.toml").read_text()
    files = ["--clients", tmp_path / "all.csv"]
    assert "exists" in refused(capsys, "new", tmp_path / "sub/mine", *files)
    assert "did you mean 'animal'" in refused(capsys, "new", tmp_path / "b", *files, "--label", "animals")
    assert "did you mean 'size'" in refused(capsys, "new", tmp_path / "b", *files, "--features", "siz,colour")
    assert "no file" in refused(capsys, "new", tmp_path / "b", "--clients", tmp_path / "none.csv")
    (tmp_path / "empty").mkdir()
    assert "no file of a known kind" in refused(capsys, "new", tmp_path / "b", "--clients", tmp_path / "empty")
    np.savez(tmp_path / "hot.npz", user=np.arange(40) % 4, x=np.zeros((40, 2)), y=np.eye(4)[np.arange(40) % 4])
    assert "save the argmax" in refused(capsys, "new", tmp_path / "b", "--clients", tmp_path / "hot.npz")
    np.savez(tmp_path / "arrays.npz", user=np.arange(40) % 4, signal=np.zeros((40, 2)))
    assert "name it with --label" in refused(capsys, "new", tmp_path / "b", "--clients", tmp_path / "arrays.npz")
    assert not (tmp_path / "b.toml").exists()


def test_a_column_of_many_words_is_left_out_and_can_be_read_by_letters(tmp_path: Path) -> None:
    notes = [f"{colour} no. {n % 90}" for n, colour in enumerate(table(rows=180)["colour"])]
    write(tmp_path / "all.csv", table(rows=180) | {"note": notes})
    new = ["new", "one", "--clients", "all.csv", "--label", "animal"]
    mixfed(*new, cwd=tmp_path)
    assert "to learn from their letters use --features note" in (tmp_path / "one.toml").read_text()
    mixfed(*["two" if word == "one" else word for word in new], "--features", "note", cwd=tmp_path)
    data = tomllib.loads((tmp_path / "two.toml").read_text())["data"]
    assert (data["fields"]["x"], data["text"]) == ("note", "characters")
