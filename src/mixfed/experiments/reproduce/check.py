"""Do stored files, definitions and pages agree? Needs no data and trains nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mixfed.errors import InputError
from mixfed.experiments.reproduce import figures, tuning
from mixfed.experiments.reproduce.definition import Definition, load
from mixfed.experiments.reproduce.judge import judge
from mixfed.experiments.reproduce.pages import arguments_of, finder, pages_in, rendered, tables_by_hand
from mixfed.experiments.reproduce.papers import all_claims
from mixfed.experiments.reproduce.plan import plan
from mixfed.experiments.reproduce.store import Store, Stored
from mixfed.experiments.texts import packaged
from mixfed.experiments.tune import Trial, at_edge, best


def problems(store: Store, pages: Path | None = None, name: str | None = None) -> list[str]:
    """One sentence for everything that does not agree; with a ``name``, in what is stored of that experiment."""
    if name is not None and load(name).name not in store.names():
        return [f"Nothing is stored of '{name}' in {store.folder}."]
    found = [problem for one in ([name] if name else store.names()) for problem in _of_file(store, one)]
    if name is None:
        found += [problem for one in packaged("reproductions") for problem in _of_definition(one)]
        if pages is not None and pages.is_dir() and not found:
            found += _of_pages(store, pages)
    return found


def _of_file(store: Store, name: str) -> Iterator[str]:
    try:
        definition = load(name)
        stored, path = store.read(definition.name), store.path(definition.name)
    except InputError as error:
        yield str(error)
        return
    yield from (f"{path}: {problem}" for problem in _of_tuning(definition, stored))
    known = {run.key: run for run in plan(definition, stored.chosen())}
    for key, record in stored.runs.items():
        if key not in known:
            yield f"{path}: {key} is no run of the experiment."
        elif record["fingerprint"] != known[key].fingerprint():
            yield f"{path}: {key} was run with other settings than the experiment has now; run it again."
    if stored.claims != judge(definition, stored):
        yield f"{path}: the verdicts of its claims do not follow from its numbers."


def _of_tuning(definition: Definition, stored: Stored) -> Iterator[str]:
    for label, record in stored.tuning.items():
        method = next((method for method in definition.runs if method.label == label), None)
        if method is None or not method.grid or definition.tune is None:
            yield f"settings of {label} are stored, and the experiment chooses none."
            continue
        if record["fingerprint"] != tuning.fingerprint_of(definition, method):
            yield f"settings of {label} were chosen from other ones than the experiment tries now."
            continue
        trials = [Trial(trial["settings"], trial["scores"]) for trial in record["trials"]]
        chosen = best(trials, record["metric"])
        if record["chosen"] != (chosen.settings if chosen else {}):
            yield f"what was chosen for {label} is not the best of its trials."
        elif chosen and record["at_edge"] != at_edge(record["grid"], chosen.settings):
            yield f"whether the settings of {label} are at the edge of its grid is not what is stored."


def _of_definition(name: str) -> Iterator[str]:
    try:
        definition = load(name)
        plan(definition, {})[0].recipe()
    except InputError as error:
        yield str(error)
        return
    for claim in definition.claims:
        if claim.id and claim.id not in all_claims():
            yield f"The experiment '{name}' tests the claim '{claim.id}', which no paper makes."


def _of_pages(store: Store, folder: Path) -> Iterator[str]:
    find = finder(store)
    for page in sorted(folder.glob("results*.md")):
        by_hand = tables_by_hand(page.read_text(encoding="utf-8"))
        if by_hand:
            yield f"{page} has {by_hand} tables that no stored run is behind."
    for page in pages_in(folder):
        text = page.read_text(encoding="utf-8")
        try:
            if rendered(text, find, page.name) != text:
                yield f"{page} is not what the stored results say; rewrite it with mixfed reproduce --pages {folder}."
            for arguments in arguments_of(text, "figure"):
                if not figures.is_current(arguments, find, folder):
                    yield f"{page}: the figure '{arguments.split()[1]}' does not show the stored results."
        except InputError as error:
            yield str(error)
