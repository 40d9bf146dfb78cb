"""A report: one HTML file with everything in it, which a browser shows without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment
from markupsafe import Markup

from mixfed.experiments.report import charts
from mixfed.experiments.report.files import write_text
from mixfed.experiments.report.tables import COSTS, amount, figure, mean_and_spread
from mixfed.experiments.report.view import Group, View, grouped

MOST_METRICS = 6
MOST_MATRICES = 4


@dataclass
class Section:
    """A heading with a sentence, a table (the first row is its head) and charts, as far as there are such."""

    title: str
    text: str = ""
    table: list[list[str]] = field(default_factory=list)
    charts: list[Any] = field(default_factory=list)


def write_report(path: Path, views: Sequence[View], command: str, told: str = "") -> None:
    """Writes the report of these runs; ``told`` is a sentence on what came of them, ``command`` repeats them."""
    groups = grouped(views)
    makers: list[Callable[[Mapping[str, Group]], Section | None]] = [
        _figures, _curves, _costs, _who_holds_what, _over_clients, _classes, _lateness, _diagnostics, _machine,
    ]  # fmt: skip
    sections = [section for section in (make(groups) for make in makers) if section is not None]
    drawn = [chart for section in sections for chart in section.charts]
    script, places = components(drawn) if drawn else ("", ())
    left = iter(places)
    for section in sections:
        section.charts = [Markup(next(left)) for _ in section.charts]
    first = views[0].recipe
    write_text(
        path,
        _template().render(
            title=first.title or first.name,
            subtitle=told or _subtitle(groups),
            warnings=[f"{name}: {text}" for name, text in _warnings(groups)],
            ended=_ended(groups),
            sections=sections,
            command=command,
            settings={name: group.first.recipe.toml() for name, group in groups.items()},
            library=Markup(_library()),
            script=Markup(script),
        ),
    )


def _subtitle(groups: Mapping[str, Group]) -> str:
    seeds = sorted({view.recipe.seed for group in groups.values() for view in group.views})
    first = next(iter(groups.values())).first
    return (
        f"{', '.join(groups)} · {first.result['rounds']} rounds · seed{'s' if len(seeds) > 1 else ''}"
        f" {', '.join(map(str, seeds))}"
    )


def _warnings(groups: Mapping[str, Group]) -> list[tuple[str, str]]:
    return [
        (name, text) for name, group in groups.items() for v in group.views for text in v.result.get("warnings", ())
    ]


def _ended(groups: Mapping[str, Group]) -> list[str]:
    """Why runs ended before their last round."""
    views = [(name, view) for name, group in groups.items() for view in group.views]
    return [f"{name}, seed {v.recipe.seed}: {v.result['ended']}" for name, v in views if v.result.get("ended")]


def _figures(groups: Mapping[str, Group]) -> Section:
    """The metrics of every method beside the paper's, and the seconds."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group.first.result["metrics"]))
    paper = {name: group.first.recipe.published.get(group.first.recipe.algorithm, {}) for name, group in groups.items()}
    head = ["method"]
    for metric in names:
        head += [metric.replace("_", " on ", 1), *(["paper"] if any(metric in p for p in paper.values()) else [])]
    rows = [[*head, "seconds"]]
    for name, group in groups.items():
        row = [name]
        for metric in names:
            row.append(mean_and_spread(group.figures(metric)))
            if any(metric in p for p in paper.values()):
                row.append(figure(paper[name].get(metric)))
        seconds = sum(view.result["seconds"] for view in group.views) / len(group.views)
        rows.append([*row, f"{seconds:.1f}"])
    text = "Mean ± standard deviation over seeds." if _of_seeds(groups) else ""
    return Section("What they reached" if len(groups) > 1 else "What it reached", text, rows)


def _curves(groups: Mapping[str, Group]) -> Section | None:
    """The first metric against rounds, bytes and seconds, and the others against rounds."""
    names = list(dict.fromkeys(metric for group in groups.values() for metric in group.metrics()))
    if not names:
        return None
    names.sort(key=lambda name: name.startswith("loss"))
    drawn = [charts.curves(groups, names[0], x) for x in ("round", "bytes", "seconds")]
    drawn += [charts.curves(groups, name) for name in names[1:MOST_METRICS]]
    text = "A click on a name in a legend hides or shows its curve."
    text += " Bands are one standard deviation, dotted lines the mean's 95% interval." if _of_seeds(groups) else ""
    return Section("On the way", text, charts=drawn)


def _of_seeds(groups: Mapping[str, Group]) -> bool:
    return any(len(group.views) > 1 for group in groups.values())


def _costs(groups: Mapping[str, Group]) -> Section:
    once = ["bytes_once"] if any(group.cost("bytes_once") for group in groups.values()) else []
    names = [*COSTS[:2], *once, *COSTS[2:]]
    rows = [["method", *(name.replace("_", " ") for name in names)]]
    rows += [[name, *(amount(cost, group.cost(cost)) for cost in names)] for name, group in groups.items()]
    bars = [
        charts.ledger(groups, ("bytes_down", "bytes_up"), "Bytes that were sent", "bytes"),
        charts.ledger(groups, ("client_flops", "server_flops"), "Operations on clients and server", "FLOPs"),
    ]
    return Section("What it cost", "", rows, bars)


def _who_holds_what(groups: Mapping[str, Group]) -> Section | None:
    found = next((v.facts["holdings"] for g in groups.values() for v in g.views if "holdings" in v.facts), None)
    if found is None:
        return None
    low, tenth, median, ninth, high = found["sizes"]
    text = (
        f"{found['clients']:,} clients; the smallest holds {low:,.0f} examples, the median {median:,.0f}, the largest"
        f" {high:,.0f} (all but two tenths hold {tenth:,.0f} to {ninth:,.0f})."
    )
    drawn = [charts.holdings(found), *([charts.centre(found)] if found["centre"] else [])]
    return Section("Who holds what", text, charts=drawn)


def _over_clients(groups: Mapping[str, Group]) -> Section | None:
    """How unevenly the clients are served: the worst and the best tenth of them."""
    known = [(name, view.facts["clients"]) for name, g in groups.items() for view in g.views if "clients" in view.facts]
    if not known:
        return None
    metric = known[0][1]["metric"]
    lowest, highest = ("best", "worst") if metric == "loss" else ("worst", "best")
    rows = [["method", "seed", f"{lowest} tenth", f"{highest} tenth", "clients looked at"]]
    for name, group in groups.items():
        for view in group.views:
            if found := view.facts.get("clients"):
                tenths = [figure(found["lowest_tenth"]), figure(found["highest_tenth"])]
                rows.append([name, str(view.recipe.seed), *tenths, f"{len(found['clients']):,} of {found['of']:,}"])
    text = f"The {metric} of single clients on their {known[0][1]['on']}."
    return Section("The spread over clients", text, rows, [charts.client_spread(groups, metric)])


def _classes(groups: Mapping[str, Group]) -> Section | None:
    some = {name: g.first.facts["confusion"] for name, g in groups.items() if "confusion" in g.first.facts}
    if not some:
        return None
    shown = list(some.items())[:MOST_MATRICES]
    left_out = f" The first {MOST_MATRICES} methods are shown." if len(some) > MOST_MATRICES else ""
    drawn = [charts.confusion(found, f"{name}: {found['of']}") for name, found in shown]
    text = f"A row is the true class, a column the answer; the shade is the share of the row.{left_out}"
    return Section("Which class is taken for which", text, charts=drawn)


def _lateness(groups: Mapping[str, Group]) -> Section | None:
    late = {name: g.first.facts["jobs"] for name, g in groups.items() if g.first.facts.get("jobs")}
    if not late:
        return None
    drawn = [charts.timeline(jobs, name) for name, jobs in late.items()]
    return Section(
        "Late clients",
        "A bar for each of the first jobs: from when the client was asked to when it reported.",
        charts=drawn,
    )


def _diagnostics(groups: Mapping[str, Group]) -> Section | None:
    drawn = []
    for name, group in groups.items():
        found = list(dict.fromkeys(key for entry in group.first.diagnostics for key in entry if key != "round"))
        panels: dict[str, list[str]] = {}
        for key in found:
            panel = key.rpartition("_")[0] if key.endswith(("_min", "_mean", "_max")) else key
            panels.setdefault(panel, []).append(key)
        for panel, keys in panels.items():
            drawn.append(charts.diagnostics(group.first, keys, f"{name}: {panel.replace('_', ' ')}"))
    return Section("Inside the method", "", charts=drawn) if drawn else None


def _machine(groups: Mapping[str, Group]) -> Section:
    """Versions and executions: what the last bits of the numbers depend on."""
    rows = [["method", "seed", "execution", "cores", "versions"]]
    for name, group in groups.items():
        for view in group.views:
            how = view.result.get("simulation", {})
            executions = ", ".join(sorted(set(how.get("executions", {}).values()))) or how.get("backend", "")
            versions = ", ".join(f"{n} {v}" for n, v in view.result.get("versions", {}).items())
            rows.append([name, str(view.recipe.seed), executions, str(how.get("cores", "")), versions])
    return Section("Where it ran", "", rows)


@cache
def _library() -> str:
    """Bokeh's own JavaScript, to be part of the page."""
    return str(Resources(mode="inline", components=["bokeh"]).render())


@cache
def _template() -> Any:
    text = files("mixfed.experiments.report").joinpath("page.html").read_text("utf-8")
    return Environment(autoescape=True, trim_blocks=True).from_string(text)
