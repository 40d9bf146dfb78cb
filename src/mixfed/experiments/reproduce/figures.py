"""Figures of pages, drawn from stored metrics: a picture knows the fingerprint of the numbers it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mixfed.errors import InputError
from mixfed.experiments.reproduce.definition import Definition
from mixfed.experiments.reproduce.plan import fingerprint
from mixfed.experiments.reproduce.store import Stored

Found = Callable[[str], tuple[Definition, Stored]]
KEY = "Description"
"""Where a PNG has the fingerprint."""


def markdown(arguments: str, find: Found) -> str:
    """``NAME FILE METRIC; METRIC: WORDS``: the picture, described in words."""
    name, file, _, told = _parts(arguments)
    return f"![{told}]({file})" if find(name)[1].runs else "*There is no figure, because no runs are stored.*"


def draw(listed: Iterable[str], find: Found, folder: Path) -> list[str]:
    """Draws the pictures whose numbers have changed: their files."""
    changed = []
    for arguments in listed:
        name, file, metrics, _ = _parts(arguments)
        definition, stored = find(name)
        curves = curves_of(definition, stored, metrics)
        mark = fingerprint(curves)
        if stored.runs and mark_of(folder / file) != mark:
            from mixfed.experiments.report.plot import plot_comparison

            plot_comparison(folder / file, definition.title, curves, mark={KEY: mark})
            changed.append(file)
    return changed


def is_current(arguments: str, find: Found, folder: Path) -> bool:
    """Whether the picture shows the numbers that are stored."""
    name, file, metrics, _ = _parts(arguments)
    definition, stored = find(name)
    return not stored.runs or mark_of(folder / file) == fingerprint(curves_of(definition, stored, metrics))


def curves_of(definition: Definition, stored: Stored, metrics: list[str]) -> dict[str, list[list[dict[str, Any]]]]:
    """The histories of every method in the first cell, with the metrics that are drawn."""
    cell = definition.cells[0].label
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for method in definition.runs:
        runs = [r for key, r in stored.runs.items() if key.label == method.label and key.cell == cell]
        for record in runs:
            kept = {n: v for n, v in record["metrics"].items() if n == "round" or not metrics or n in metrics}
            entries = [dict(zip(kept, values, strict=True)) for values in zip(*kept.values(), strict=True)]
            found.setdefault(method.label, []).append(entries)
    return found


def mark_of(path: Path) -> str:
    """The fingerprint in a picture; none where there is no picture."""
    if not path.is_file():
        return ""
    from PIL import Image

    with Image.open(path) as image:
        return str(image.info.get(KEY, ""))


def _parts(arguments: str) -> tuple[str, str, list[str], str]:
    spec, colon, told = arguments.partition(":")
    words = spec.split(maxsplit=2)
    if len(words) < 2 or not colon or not words[1].endswith(".png"):
        raise InputError(f"a figure is 'NAME FILE.png METRIC; …: WORDS', not '{arguments}'.")
    metrics = [metric.strip() for metric in words[2].split(";")] if len(words) > 2 else []
    return words[0], words[1], metrics, told.strip()
