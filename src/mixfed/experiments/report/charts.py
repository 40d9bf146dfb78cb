"""The charts of a report, drawn by Bokeh: they can be hovered over, and a click on a legend hides a curve.

Backgrounds are transparent and all writing is of a grey that is readable on white and on black, so that one chart
serves light and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, CustomJSTickFormatter, FactorRange, HoverTool
from bokeh.models.annotations import Whisker
from bokeh.palettes import Category10, Category20, Turbo256
from bokeh.plotting import figure

from mixfed.experiments.report.tables import amount
from mixfed.experiments.report.view import Group, View

GREY = "#808890"
HEIGHT = 320
LETTERS = 44
"""So many letters have room below a chart on a narrow screen."""


def palette(count: int) -> list[str]:
    """Colours that can be told apart, as many as wanted."""
    if count <= 10:
        return list(Category10[10][:count])
    if count <= 20:
        return list(Category20[20][:count])
    return [Turbo256[round(i * 255 / (count - 1))] for i in range(count)]


def curves(groups: Mapping[str, Group], metric: str, against: str = "round") -> Any:
    """The metric over rounds, bytes or seconds: the mean over seeds, with a band of one standard deviation and dotted
    lines around the mean's 95% interval."""
    chart = _chart(f"{metric.replace('_', ' on ', 1)}", _UNITS[against], "")
    for colour, (name, group) in zip(palette(len(groups)), groups.items(), strict=True):
        table = group.curve(metric)
        if not len(table["round"]):
            continue
        source = ColumnDataSource(table)
        if table["spread"].any():
            chart.varea(against, "low", "high", source=source, color=colour, alpha=0.18, legend_label=name)
            for side in ("surely_above", "surely_below"):
                chart.line(against, side, source=source, color=colour, line_dash="dotted", legend_label=name)
        if len(table["round"]) == 1:
            chart.scatter(against, "mean", source=source, color=colour, size=8, legend_label=name)
        else:
            chart.line(against, "mean", source=source, color=colour, width=2, legend_label=name)
    tips = [("", "$name"), ("round", "@round"), (metric, "@mean{0.0000} ± @spread{0.0000}")]
    tips += [("bytes", "@bytes{0,0}"), ("seconds", "@seconds{0.0}")] if against != "round" else []
    for renderer in chart.renderers:
        renderer.name = next(item.label.value for item in chart.legend[0].items if renderer in item.renderers)
    chart.add_tools(HoverTool(tooltips=tips, mode="mouse", renderers=[r for r in chart.renderers if _is_curve(r)]))
    if against == "bytes":
        chart.xaxis.formatter = _in_units()
    _toggles(chart)
    return chart


def ledger(groups: Mapping[str, Group], names: Sequence[str], title: str, unit: str) -> Any:
    """Some costs as bars, side by side for each method."""
    places = [(name, cost.replace("_", " ")) for name in groups for cost in names]
    amounts = [group.cost(cost) for group in groups.values() for cost in names]
    colours = palette(len(names)) * len(groups)
    told = [amount(cost, group.cost(cost)) for group in groups.values() for cost in names]
    source = ColumnDataSource({"place": places, "amount": amounts, "colour": colours, "told": told})
    chart = _bars(title, x_range=FactorRange(factors=places))
    chart.vbar("place", 0.85, "amount", source=source, color="colour")
    chart.add_tools(HoverTool(tooltips=[("", "@place"), (unit, "@told")]))
    chart.yaxis.formatter = _in_units()
    chart.xaxis.major_label_orientation = 1.2
    chart.y_range.start = 0
    return _styled(chart, "", unit)


def holdings(found: Mapping[str, Any]) -> Any:
    """How many examples of each label every client shown holds."""
    labels = [f"{i}: {word}" if found["labels"].count(word) > 1 else word for i, word in enumerate(found["labels"])]
    columns: dict[str, Any] = {"client": [str(c) for c in found["shown"]]}
    columns |= {f"n{i}": [row[i] for row in found["table"]] for i in range(len(labels))}
    some = f"{len(found['shown'])} of {found['clients']:,}" if len(found["shown"]) < found["clients"] else "all"
    chart = _bars(f"What {some} clients hold", x_range=columns["client"])
    stacks = [f"n{i}" for i in range(len(labels))]
    bars = chart.vbar_stack(
        stacks, x="client", width=0.9, color=palette(len(labels)), source=ColumnDataSource(columns), legend_label=labels
    )
    for bar, stack, label in zip(bars, stacks, labels, strict=True):
        chart.add_tools(
            HoverTool(renderers=[bar], tooltips=[("client", "@client"), ("label", label), ("examples", f"@{stack}")])
        )
    chart.xaxis.major_label_text_alpha = 0 if len(found["shown"]) > 20 else 1
    _styled(chart, "client", "examples")
    _toggles(chart)
    return chart


def centre(found: Mapping[str, Any]) -> Any:
    """How many examples of each label the centre holds, in the colours of the clients' bars."""
    places = [f"{word} " if found["labels"].count(word) > 1 else word for word in found["labels"]]
    source = ColumnDataSource({"label": places, "count": found["centre"], "colour": palette(len(places))})
    chart = _bars(f"What the centre holds: {sum(found['centre']):,} examples", y_range=places[::-1])
    chart.hbar("label", 0.8, "count", source=source, color="colour")
    chart.add_tools(HoverTool(tooltips=[("label", "@label"), ("examples", "@count")]))
    return _styled(chart, "examples", "")


def client_spread(groups: Mapping[str, Group], metric: str) -> Any:
    """Where the clients lie: the middle half, and whiskers from the worst to the best tenth."""
    names = [name for name, group in groups.items() if group.client_values(metric).size]
    marks = np.array([np.quantile(groups[n].client_values(metric), (0.1, 0.25, 0.5, 0.75, 0.9)) for n in names])
    columns = {"name": names, "colour": palette(len(names))}
    source = ColumnDataSource(columns | {f"q{i}": marks[:, i] for i in range(5)})
    chart = _bars(f"{metric} over clients", x_range=names)
    chart.add_layout(Whisker(base="name", lower="q0", upper="q4", source=source, line_color=GREY))
    chart.vbar("name", 0.5, "q3", "q1", source=source, color="colour", alpha=0.75)
    chart.vbar("name", 0.5, "q2", "q2", source=source, line_color=GREY, line_width=2)
    tips = [("", "@name"), ("median", "@q2{0.000}"), ("middle half", "@q1{0.000} to @q3{0.000}")]
    chart.add_tools(HoverTool(tooltips=[*tips, ("all but two tenths", "@q0{0.000} to @q4{0.000}")]))
    chart.xaxis.major_label_orientation = 0.7
    return _styled(chart, "", metric)


def confusion(found: Mapping[str, Any], title: str) -> Any:
    """Which class is taken for which: a row for each true class, shares of the row as shades."""
    table = np.array(found["table"], float)
    labels = [str(word) for word in found["labels"]]
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    true, answered = np.meshgrid(range(len(labels)), range(len(labels)), indexing="ij")
    source = ColumnDataSource(
        {
            "true": [labels[i] for i in true.flat],
            "answered": [labels[i] for i in answered.flat],
            "count": table.astype(int).flatten(),
            "share": shares.flatten(),
        }
    )
    chart = _bars(title, x_range=labels, y_range=labels[::-1], height=max(HEIGHT, 16 * len(labels)))
    chart.rect("answered", "true", 0.96, 0.96, source=source, color="#2f7ed8", alpha="share", line_color=GREY)
    tips = [("true", "@true"), ("answered", "@answered"), ("examples", "@count (@share{0.0 %} of the class)")]
    chart.add_tools(HoverTool(tooltips=tips))
    chart.xaxis.major_label_orientation = 0.9
    return _styled(chart, "answered", "true")


def timeline(jobs: Sequence[Mapping[str, Any]], title: str) -> Any:
    """When clients were asked and when they reported: a bar for each of the first jobs."""
    columns = {name: [job[name] for job in jobs] for name in ("client", "asked", "reported")}
    source = ColumnDataSource(columns | {"row": list(range(len(jobs)))})
    chart = _chart(title, "time in rounds", "job")
    chart.hbar("row", 0.7, "reported", "asked", source=source, color=palette(1)[0])
    tips = [("client", "@client"), ("asked", "@asked{0.00}"), ("reported", "@reported{0.00}")]
    chart.add_tools(HoverTool(tooltips=tips))
    return chart


def diagnostics(view: View, names: Sequence[str], title: str) -> Any:
    """Some diagnostics of one run over its rounds, a curve each."""
    chart = _chart(title, "round", "")
    for colour, name in zip(palette(len(names)), names, strict=True):
        entries = [entry for entry in view.diagnostics if entry.get(name) is not None]
        source = ColumnDataSource({"round": [e["round"] for e in entries], "value": [e[name] for e in entries]})
        line = chart.line("round", "value", source=source, color=colour, width=2, legend_label=name.replace("_", " "))
        chart.add_tools(HoverTool(renderers=[line], tooltips=[(name, "@value{0.0000}"), ("round", "@round")]))
    _toggles(chart)
    return chart


_UNITS = {"round": "round", "bytes": "bytes sent down and up", "seconds": "seconds"}


def _bars(title: str, **options: Any) -> Any:
    """A chart of things that have names, which nobody zooms into."""
    usual: dict[str, Any] = {"height": HEIGHT, "tools": "", "toolbar_location": None}
    return figure(sizing_mode="stretch_width", title=title, **(usual | options))


def _chart(title: str, x: str, y: str) -> Any:
    chart: Any = figure(height=HEIGHT, sizing_mode="stretch_width", title=title, tools="box_zoom,reset")
    chart.toolbar.autohide = True
    chart.toolbar.logo = None
    return _styled(chart, x, y)


def _styled(chart: Any, x: str, y: str) -> Any:
    chart.background_fill_alpha = chart.border_fill_alpha = 0
    chart.outline_line_color = None
    chart.title.text_color = GREY
    chart.grid.grid_line_color, chart.grid.grid_line_alpha = GREY, 0.25
    for axis, label in ((chart.xaxis, x), (chart.yaxis, y)):
        axis.axis_label = label or None
        axis.axis_label_text_color = axis.major_label_text_color = GREY
        axis.axis_line_color = axis.major_tick_line_color = GREY
        axis.minor_tick_line_color = None
    return chart


def _toggles(chart: Any) -> None:
    """A click on a name of the legend, which stands below the chart, hides what it names."""
    if not chart.legend:
        return
    legend = chart.legend[0]
    chart.add_layout(legend, "below")
    legend.click_policy = "hide"
    longest = max(len(item.label.value) for item in legend.items)
    legend.orientation, legend.ncols = "horizontal", max(1, LETTERS // (longest + 4))
    legend.background_fill_alpha = legend.border_line_alpha = 0
    legend.label_text_color = GREY
    legend.inactive_fill_alpha = 0.2


def _in_units() -> CustomJSTickFormatter:
    """Large numbers as 20 k, 3 M, 1.5 G."""
    return CustomJSTickFormatter(
        code="""
        const units = ["", " k", " M", " G", " T", " P"];
        let size = tick, i = 0;
        while (Math.abs(size) >= 1000 && i < units.length - 1) { size /= 1000; i += 1; }
        return Number(size.toPrecision(3)) + units[i];
        """
    )


def _is_curve(renderer: Any) -> bool:
    return type(renderer.glyph).__name__ in ("Line", "Scatter") and renderer.glyph.y == "mean"
