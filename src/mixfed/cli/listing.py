"""``mixfed list``."""

from __future__ import annotations

import tomllib

from rich.table import Table

from mixfed.algorithms.registry import ALGORITHMS
from mixfed.cli.console import stdout
from mixfed.data.sources import SOURCES
from mixfed.experiments.texts import packaged


def show() -> None:
    """Four tables: algorithms, recipes, studies, data sources."""
    _table("Algorithms", {name: entry.line for name, entry in ALGORITHMS.items()})
    for heading, kind in (("Recipes", "recipes"), ("Studies", "studies")):
        _table(heading, {name: tomllib.loads(text).get("title", "") for name, text in packaged(kind).items()})
    _table("Data sources", {name: source.description for name, source in SOURCES.items()})


def _table(title: str, lines: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan", min_width=18)
    table.add_column()
    for name, line in lines.items():
        table.add_row(name, line)
    stdout.print(table)
    stdout.print()
