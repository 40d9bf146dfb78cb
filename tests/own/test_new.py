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


FOUND: dict[Callable[[Path], dict[str, str]], dict[str, Any]] = {
    pictures: {"model.name": "cnn", "data.client": "user", "data.fields.y": "label", "data.fields.x": "image"},
    animals: {"model.name": "mlp", "data.client": "who", "data.fields.x": ["size", "colour"], "data.test": "test.csv"},
    measurements: {"data.labels": "standard", "model.criterion": "squared_error", "data.missing": "drop"},
    walks: {"data.client": "walker", "data.fields.x": ["size", "colour"]},
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
    assert "mixfed run sub/mine.toml" in told
    assert 'clients = "../all.csv"' in (tmp_path / "sub/mine.toml").read_text()
    files = ["--clients", tmp_path / "all.csv"]
    assert "exists" in refused(capsys, "new", tmp_path / "sub/mine", *files)
    assert "did you mean 'animal'" in refused(capsys, "new", tmp_path / "b", *files, "--label", "animals")
    assert "did you mean 'size'" in refused(capsys, "new", tmp_path / "b", *files, "--features", "siz,colour")
    assert "no file" in refused(capsys, "new", tmp_path / "b", "--clients", tmp_path / "none.csv")
    assert not (tmp_path / "b.toml").exists()
