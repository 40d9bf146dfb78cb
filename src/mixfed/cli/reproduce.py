"""``mixfed reproduce``: experiments, what is stored of them, and whether their claims hold."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from mixfed.cli.common import numbers_of, words
from mixfed.cli.console import notes, stdout
from mixfed.cli.watching import watching
from mixfed.errors import InputError, RunStopped
from mixfed.experiments.report.files import folder_for
from mixfed.experiments.reproduce import definition as definitions
from mixfed.experiments.reproduce.definition import Definition
from mixfed.experiments.reproduce.inventory import Entry, inventory
from mixfed.experiments.reproduce.plan import Asked
from mixfed.experiments.reproduce.runs import Wanted, judge_again
from mixfed.experiments.reproduce.store import Store, Stored
from mixfed.experiments.reproduce.tables import against_paper, claim_rows
from mixfed.experiments.texts import reproduction_table


def execute(
    name: str,
    store: Path,
    out: Path | None,
    *,
    data: Path | None,
    only: str | None,
    cells: str | None,
    seeds: str | None,
    settings: list[str] | None,
    threads: int | None,
) -> None:
    """Runs what is missing, and prints what is stored then beside the paper's figures."""
    reproduction_table(name)  # refused at once, if there is no such experiment
    definition = definitions.load(name)
    cores = [f"simulator.threads={threads}", f"simulator.cores={threads}"] if threads is not None else []
    asked = Asked(data, [*cores, *(settings or [])])
    labels = words(only, "--only") if only else None
    places = words(cells, "--cells") if cells else None
    numbers = numbers_of(seeds) if seeds else None
    from mixfed.experiments.reproduce.perform import reproduce

    with watching() as watch:
        stored = reproduce(
            definition,
            Store(store),
            folder_for(out, f"reproduce-{definition.name}"),
            asked=asked,
            wanted=Wanted(labels, places, numbers),
            watch=watch,
            say=lambda text: notes.print(text, style="dim", soft_wrap=True),
        )
    show(definition, stored)
    stdout.print(f"Stored: {Store(store).path(definition.name)}", soft_wrap=True)


def show(definition: Definition, stored: Stored) -> None:
    """The figures beside the paper's, and the claims."""
    for title, head, rows in against_paper(definition, stored):
        table = Table(title=title, title_justify="left")
        for i, heading in enumerate(head):
            table.add_column(heading, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        stdout.print(table)
    for verdict, text, evidence in claim_rows(definition, stored):
        stdout.print(f"{verdict}: {text} ({evidence})", soft_wrap=True)


def show_stored(store: Path) -> None:
    """Every experiment: what is stored and what is missing, and about how long that would take."""
    table = Table(title=f"Experiments, stored in {store}", title_justify="left")
    for heading in ("experiment", "stored", "missing", "about", "needs"):
        table.add_column(heading, justify="right" if heading in ("stored", "missing", "about") else "left")
    entries = inventory(Store(store))
    for entry in entries:
        table.add_row(entry.name, str(entry.stored), str(entry.missing), duration(entry.seconds), entry.needs)
    stdout.print(table)
    stdout.print(_sum(entries), soft_wrap=True)


def _sum(entries: list[Entry]) -> str:
    here = [entry for entry in entries if not entry.needs]
    told = f"{sum(entry.stored for entry in entries)} runs are stored"
    return f"{told}; those missing that can be run here would take about {duration(sum(e.seconds for e in here))}."


def duration(seconds: float) -> str:
    """About how long that is."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def check(name: str | None, store: Path, pages: Path | None) -> None:
    """Says what does not agree, and fails if something does not."""
    from mixfed.experiments.reproduce.check import problems

    found = problems(Store(store), pages if pages is not None else Path("docs"), name)
    if found:
        for problem in found:
            stdout.print(f"- {problem}", soft_wrap=True)
        raise RunStopped(f"{len(found)} of the stored results or pages are not as they should be")
    stdout.print(f"The results in {store} and the pages agree with their definitions.")


def write_pages(store: Path, pages: Path) -> None:
    """Judges the claims of what is stored anew, rewrites the pages, and says what has changed."""
    from mixfed.experiments.reproduce.pages import rewrite

    if not pages.is_dir():
        raise InputError(f"There is no folder {pages} with pages.")
    judged = [Store(store).path(name) for name in judge_again(Store(store))]
    changed = [*judged, *rewrite(Store(store), pages)]
    told = ", ".join(str(path) for path in changed) if changed else "nothing has changed"
    stdout.print(f"Pages: {told}", soft_wrap=True)
