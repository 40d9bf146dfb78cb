"""Packaged studies: a recipe run at several settings, as the papers' appendices do."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from mixfed.errors import InputError
from mixfed.experiments.schema import nearest


@dataclass(frozen=True)
class Study:
    """Settings to compare: every point is a label and the settings that make it, for every algorithm."""

    name: str
    title: str
    recipe: str
    algorithms: list[str]
    metric: str
    points: dict[str, list[str]]
    paper: str = ""
    settings: tuple[str, ...] = ()

    def on(self, recipe: str) -> Study:
        """The same settings compared on another recipe, of which the paper says nothing."""
        stem = Path(recipe).stem
        return replace(self, name=f"{self.name}-{stem}", title=f"{self.title} ({stem})", recipe=recipe, paper="")


def packaged() -> dict[str, str]:
    """The text of every packaged study by name."""
    found = {
        f.name.removesuffix(".toml"): f
        for f in files("mixfed.experiments.studies").iterdir()
        if f.name.endswith(".toml")
    }
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}


def load(name: str) -> Study:
    """A packaged study by its name, or one of the user's by the path of its TOML file."""
    known = packaged()
    if name in known:
        return _study(name, known[name])
    path = Path(name)
    if path.suffix != ".toml" or not path.is_file():
        raise InputError(
            f"There is no study '{name}'; did you mean '{nearest(name, list(known))}', or the path of a .toml?"
        )
    return _study(path.stem, path.read_text(encoding="utf-8"))


def _study(name: str, text: str) -> Study:
    try:
        table: dict[str, Any] = tomllib.loads(text)
        points = {point["label"]: list(point["set"]) for point in table.pop("points")}
        settings = tuple(table.pop("set", ()))
        return Study(name=name, points=points, settings=settings, **table)
    except (tomllib.TOMLDecodeError, TypeError, KeyError) as error:
        raise InputError(
            f"The study '{name}' is not well formed ({error}); it needs title, recipe, algorithms, metric and points"
            " with label and set."
        ) from error
