"""What is written between the comments of a page: tables of stored figures, claims, and numbers in prose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from mixfed.errors import InputError
from mixfed.experiments.reproduce.definition import Definition, Method, term_of
from mixfed.experiments.reproduce.judge import (
    NOT_TRIED,
    combined,
    difference,
    judge,
    smaller_is_better,
    term_values,
    values_of,
)
from mixfed.experiments.reproduce.papers import PAPERS, PaperClaim, claims_of
from mixfed.experiments.reproduce.store import Record, Stored
from mixfed.experiments.reproduce.tables import NOTHING, Rows, evidence, number, paper, shown
from mixfed.experiments.texts import packaged

Found = Callable[[str], tuple[Definition, Stored]]
"""Finds an experiment, and what is stored of it, by name."""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, its first column to the left."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def table(arguments: str, find: Found) -> str:
    """``NAME methods [@ CELL]: METRIC [as HEADING]; …``: a row for each method.
    ``NAME cells METRIC[: LABEL; …]``: a row for each cell, a column for each method.
    ``NAME labels METRIC[: CELL; …]``: a row for each method, and for each cell the paper's figure and the one here.

    A metric after ``paper`` is the paper's figure.
    """
    spec, _, listed = arguments.partition(":")
    words = spec.split(maxsplit=2)
    if len(words) < 2 or words[1] not in _SHAPES:
        raise InputError(f"a table is 'NAME methods|cells|labels …', not '{arguments}'.")
    definition, stored = find(words[0])
    rest = words[2].strip() if len(words) > 2 else ""
    items = [item.strip() for item in listed.split(";") if item.strip()]
    if not stored.runs:
        return nothing_stored(definition)
    head, rows = _SHAPES[words[1]](definition, stored, rest, items)
    return f"{markdown(head, rows)}\n\n{caption(definition, stored)}"


def _methods(definition: Definition, stored: Stored, rest: str, items: list[str]) -> tuple[list[str], Rows]:
    cell = definition.cell(rest.removeprefix("@").strip()).label
    columns = [item.partition(" as ") for item in items or [definition.metric]]
    rows = []
    for method in definition.runs:
        if cell in definition.cells_of(method):
            cells = [_cell(definition, stored, method, cell, metric.strip()) for metric, _, _ in columns]
            rows.append([method.label, *cells])
    return ["", *(heading.strip() or metric.strip() for metric, _, heading in columns)], rows


def _cell(definition: Definition, stored: Stored, method: Method, cell: str, metric: str) -> str:
    if metric.startswith("paper "):
        return paper(definition, method.label, cell, metric.removeprefix("paper "))
    values = list(values_of(definition, stored, method.label, cell, metric).values())
    runs = [record for key, record in stored.runs.items() if (key.label, key.cell) == (method.label, cell)]
    if not any(value is not None for value in values) and not any(record.get("stopped") for record in runs):
        return NOTHING  # this is not measured in such runs
    return shown(definition, metric, values)


def _cells(definition: Definition, stored: Stored, rest: str, items: list[str]) -> tuple[list[str], Rows]:
    metric = rest or definition.metric
    methods = [definition.method(item) for item in items] or definition.runs
    rows = [
        [cell.label, *(_cell(definition, stored, method, cell.label, metric) for method in methods)]
        for cell in definition.cells
    ]
    return ["", *(method.label for method in methods)], rows


def _labels(definition: Definition, stored: Stored, rest: str, items: list[str]) -> tuple[list[str], Rows]:
    metric = rest or definition.metric
    cells = [definition.cell(item).label for item in items] or [cell.label for cell in definition.cells]
    head, rows = [""], [[method.label] for method in definition.runs]
    for cell in cells:
        figures = [paper(definition, method.label, cell, metric) for method in definition.runs]
        known = any(figure != NOTHING for figure in figures)
        head += [f"{cell}: paper", "here"] if known else [cell]
        for row, method, figure in zip(rows, definition.runs, figures, strict=True):
            planned = cell in definition.cells_of(method)
            here = _cell(definition, stored, method, cell, metric) if planned else ""
            row += [figure, here] if known else [here]
    return head, rows


_SHAPES: dict[str, Callable[[Definition, Stored, str, list[str]], tuple[list[str], Rows]]] = {
    "methods": _methods,
    "cells": _cells,
    "labels": _labels,
}


def nothing_stored(definition: Definition) -> str:
    """What stands in place of a table that has no figure."""
    return (
        f"*No runs are stored; `mixfed reproduce {definition.name} --data DIR` makes them ({amount_of(definition)}).*"
    )


def amount_of(definition: Definition) -> str:
    """How many runs an experiment has, about how long all of them take, and what they need."""
    needs = f", needs {definition.needs}" if definition.needs else ""
    return f"{planned_runs(definition)} runs, about {cost_of(definition)} in all{needs}"


def cost_of(definition: Definition) -> str:
    """About how long all runs of an experiment take, without the trials that choose settings."""
    seconds = sum(runs_of(definition, m) * (m.seconds or definition.seconds) for m in definition.runs)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"


def planned_runs(definition: Definition) -> int:
    """How many runs an experiment has."""
    return sum(runs_of(definition, method) for method in definition.runs)


def runs_of(definition: Definition, method: Method) -> int:
    """How many of its runs are of a method."""
    return len(definition.cells_of(method)) * len(method.seeds or definition.seeds)


def caption(definition: Definition, stored: Stored) -> str:
    """What a table's figures are, and what of them is missing."""
    what = "last evaluation" if definition.last == 1 else f"best of the last {definition.last} evaluations"
    seeds = ", ".join(map(str, definition.seeds))
    spread = ", mean ± standard deviation over seeds" if len(definition.seeds) > 1 else ", seed"
    told = f"`mixfed reproduce {definition.name}`: {what}{spread} {seeds}."
    planned = planned_runs(definition)
    missing = planned - len(stored.runs)
    return f"*{told}*" if missing <= 0 else f"*{told} {missing} of {planned} runs are missing.*"


def claims(arguments: str, find: Found) -> str:
    """``NAME``: every claim of an experiment with its verdict and evidence."""
    definition, stored = find(arguments.strip())
    if not stored.runs:
        return nothing_stored(definition)
    rows = [
        [entry["claim"], f"**{entry['verdict']}**", evidence(definition, entry)] for entry in judge(definition, stored)
    ]
    lines = markdown(["claim", "verdict", "evidence"], rows).splitlines()
    return "\n".join([lines[0], "|---|---|---|", *lines[2:]])


def winners(arguments: str, find: Found) -> str:
    """``NAME METRIC[: LABEL; …]``: for each cell the best of all methods, or of these, and its lead over the second.

    The lead is a mean of paired differences over seeds with its 95% interval; a winner is in bold if all of that is
    above 0. Cells in which one of the methods has not run, or stopped, have no winner.
    """
    spec, _, listed = arguments.partition(":")
    words = spec.split(maxsplit=1)
    definition, stored = find(words[0] if words else "")
    if not stored.runs:
        return nothing_stored(definition)
    metric = words[1].strip() if len(words) > 1 else definition.metric
    items = [item.strip() for item in listed.split(";") if item.strip()]
    methods = [definition.method(item) for item in items] or definition.runs
    found = {cell.label: _won(definition, stored, methods, cell.label, metric) for cell in definition.cells}
    rows = {cell: row for cell, row in found.items() if row}
    table = markdown(["", "ahead", metric, "second", "by"], [[cell, *row] for cell, row in rows.items()])
    won = Counter(row[0].strip("*") for row in rows.values())
    told = ", ".join(f"{label} in {count}" for label, count in won.most_common())
    rest = f"; {len(found) - len(rows)} are not complete" if len(rows) < len(found) else ""
    return f"{table}\n\nAhead: {told or 'nobody'} of {len(found)} cells{rest}.\n\n{caption(definition, stored)}"


def _won(definition: Definition, stored: Stored, methods: Sequence[Method], cell: str, metric: str) -> list[str]:
    """Who is ahead in a cell, with which figure, of whom and by how much; nothing where that is not known."""
    figures: dict[str, dict[int, float]] = {}
    for method in (method for method in methods if cell in definition.cells_of(method)):
        values = values_of(definition, stored, method.label, cell, metric)
        figures[method.label] = {seed: value for seed, value in values.items() if value is not None}
        if not values or len(figures[method.label]) < len(values):
            return []
    sign = -1.0 if smaller_is_better(metric) else 1.0
    ranked = sorted(figures, key=lambda label: -sign * sum(figures[label].values()) / len(figures[label]))
    shared = figures[ranked[0]].keys() & figures[ranked[1]].keys() if len(ranked) > 1 else set()
    if not shared:
        return []
    first, second = (figures[label] for label in ranked[:2])
    lead = difference({seed: sign * (first[seed] - second[seed]) for seed in sorted(shared)})
    by = number(definition, metric, lead.mean)
    by += "" if lead.half is None else f" ± {number(definition, metric, lead.half)}"
    told = f"**{ranked[0]}**" if lead.low > 0 else ranked[0]
    return [told, shown(definition, metric, list(first.values())), ranked[1], _signed(by)]


def tuning(arguments: str, find: Found) -> str:
    """``NAME``: what was tried for every method, how it did, what was chosen, and whether that is at an edge."""
    definition, stored = find(arguments.strip())
    rows = []
    for method in definition.runs:
        if method.grid:
            record = stored.tuning.get(method.label)
            rows.append([method.label, *(_tuned(definition, record) if record else ["not tried here", "", ""])])
    how = definition.tune
    lines = markdown(["method", "tried", f"{definition.metric} on {how.on if how else ''} data", "chosen"], rows)
    first, _, *others = lines.splitlines()
    return "\n".join([first, "|---|---|---|---|", *others])


def _tuned(definition: Definition, record: Record) -> list[str]:
    keys = list(record["grid"])
    tried = ", ".join(_point(trial["settings"], keys) for trial in record["trials"])
    scores = []
    for trial in record["trials"]:
        told = shown(definition, definition.metric, trial["scores"], spread=False)
        scores.append(f"**{told}**" if trial["settings"] == record["chosen"] else told)
    edge = f"; **at the edge**: {', '.join(map(_name, record['at_edge']))}" if record["at_edge"] else ""
    names = ", ".join(_name(key) for key in keys)
    return [f"({names}) = {tried}", ", ".join(scores), _point(record["chosen"], keys) + edge]


def _name(key: str) -> str:
    return " ".join(key.split(".")[-2:]).replace("_", " ").replace("learning rate", "rate")


def _point(settings: Record, keys: Sequence[str]) -> str:
    values = ", ".join(f"{settings[key]:g}" if isinstance(settings[key], float) else str(settings[key]) for key in keys)
    return f"({values})" if len(keys) > 1 else values


def quoted(arguments: str, find: Found) -> str:
    """``NAME | LABEL[ - LABEL][ @ CELL] | METRIC[ | mean|values|interval|least|greatest]``: a number in prose.

    A difference is a mean with its 95% interval; a figure is a mean and its standard deviation.
    """
    parts = [part.strip() for part in arguments.split("|")]
    if not 3 <= len(parts) <= 4:
        raise InputError(f"a number is 'EXPERIMENT | LABEL | METRIC', not '{arguments}'.")
    definition, stored = find(parts[0])
    term, metric, how = parts[1], parts[2], parts[3] if len(parts) > 3 else ""
    labels = [pair for pair in term_of(term) if definition.method(pair[0])]
    cell = next((cell for _, cell in labels if cell), definition.cells[0].label)
    if how == "paper":
        return paper(definition, labels[0][0], cell, metric)
    values = term_values(definition, stored, term, cell, metric)
    assert not isinstance(values, float)
    numbers = [value for value in values.values() if value is not None]
    if not numbers or len(numbers) < len(values):
        return NOTHING
    if how == "values":
        return ", ".join(_signed(number(definition, metric, value)) for value in numbers)
    if how in ("least", "greatest"):
        return _signed(number(definition, metric, (min if how == "least" else max)(numbers)))
    if len(labels) == 2:
        found = difference(dict(enumerate(numbers)))
        mean = _signed(number(definition, metric, found.mean))
        return mean if found.half is None or how == "mean" else f"{mean} ± {number(definition, metric, found.half)}"
    return _signed(shown(definition, metric, numbers, spread=how != "mean"))


def _signed(text: str) -> str:
    return text.replace("-", "−")


def summary(arguments: str, find: Found) -> str:
    """``PAPER``: every claim of a paper, the paper's figure, whether it holds, and where that is seen."""
    key = arguments.strip()
    if key not in PAPERS:
        raise InputError(f"the papers are {', '.join(PAPERS)}, not '{key}'.")
    tests = _tests(find)
    rows = [
        [f"{claim.text} ({claim.where})", claim.figure, *_settled(claim, tests.get(claim.id, []))]
        for claim in claims_of(key)
    ]
    first, _, *others = markdown(["claim", "the paper's figure", "verdict", "evidence"], rows).splitlines()
    return "\n".join([first, "|---|---|---|---|", *others])


Test = tuple[Definition, Stored, Record]


def _tests(find: Found) -> dict[str, list[Test]]:
    """By the paper's claim: every experiment that tests it, and what came of it."""
    found: dict[str, list[Test]] = {}
    for name in packaged("reproductions"):
        definition, stored = find(name)
        for claim, entry in zip(definition.claims, judge(definition, stored), strict=True):
            if claim.id:
                found.setdefault(claim.id, []).append((definition, stored, entry))
    return found


def _settled(claim: PaperClaim, tests: Sequence[Test]) -> list[str]:
    verdict = combined([entry["verdict"] for _, _, entry in tests])
    told = list(dict.fromkeys(_one_test(*test) for test in tests))
    return [f"**{verdict}**", " · ".join([*told, *([claim.note] if claim.note else [])]) or NOTHING]


def _one_test(definition: Definition, stored: Stored, entry: Record) -> str:
    name = definition.name
    if entry["verdict"] == NOT_TRIED:
        return f"`mixfed reproduce {name} --data DIR` ({amount_of(definition)})"
    return f"[{name}](../results/{name}.json): {entry['claim']}: {entry['verdict']} ({evidence(definition, entry)})"


def needed(arguments: str, find: Found) -> str:
    """Every experiment that needs what is not at hand everywhere, with its command and about how long it takes."""
    rows = []
    for name in packaged("reproductions"):
        definition, stored = find(name)
        if definition.needs:
            runs = f"{len(stored.runs)} of {planned_runs(definition)}"
            command = f"`mixfed reproduce {name} --data DIR`"
            rows.append([definition.title, definition.needs, command, runs, cost_of(definition)])
    first, _, *others = markdown(["what", "needs", "command", "runs stored", "all runs take about"], rows).splitlines()
    return "\n".join([first, "|---|---|---|---:|---:|", *others])


def experiments(arguments: str, find: Found) -> str:
    """Every experiment, how many of its runs are stored, and how many of its claims hold."""
    rows = []
    for name in packaged("reproductions"):
        definition, stored = find(name)
        planned = planned_runs(definition)
        verdicts = [entry["verdict"] for entry in judge(definition, stored)]
        counts = [f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)]
        minutes = sum(record["seconds"] for record in stored.runs.values()) / 60
        rows.append(
            [f"`{name}`", definition.title, f"{len(stored.runs)} of {planned}", f"{minutes:.0f}", ", ".join(counts)]
        )
    first, _, *others = markdown(["name", "what", "runs stored", "minutes", "claims"], rows).splitlines()
    return "\n".join([first, "|---|---|---:|---:|---|", *others])
