"""Plots of metrics over rounds, on matplotlib's figures (no window, no global state)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from mixfed.core.files import write_atomically
from mixfed.errors import InputError
from mixfed.experiments.scores import half_interval

History = Sequence[Mapping[str, Any]]
GREY = "#555555"
MOST_PANELS = 6
FORMATS = ("png", "svg", "pdf", "jpg", "jpeg", "webp", "tif", "tiff", "eps", "ps")


def plot_run(path: Path, title: str, history: History) -> None:
    """The metrics of one run, a panel each."""
    plot_comparison(path, title, {"": [history]})


def plot_comparison(
    path: Path, title: str, runs: Mapping[str, Sequence[History]], mark: Mapping[str, str] | None = None
) -> None:
    """A panel per metric, a curve per algorithm: the mean over its runs, a band of one standard deviation, and dotted
    lines around the mean's 95% interval.

    ``mark`` is written into the picture's file, beside the picture.
    """
    metrics = _metrics(runs)[:MOST_PANELS]
    columns = max(min(len(metrics), 3), 1)
    rows = -(-max(len(metrics), 1) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows + 0.6), dpi=130, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    colours = [colormaps["tab10"](i % 10) for i in range(len(runs))]
    for ax, metric in zip(panels, metrics, strict=False):
        for number, (name, histories) in enumerate(runs.items()):
            style = "-" if number < 10 else "--"
            _curve(ax, histories, metric, name, colours[number], style)
        _style(ax, metric)
    for ax in list(figure.axes)[len(metrics) :]:
        ax.set_axis_off()
    figure.suptitle(plain(title), fontsize=12, x=0.01, ha="left")
    if any(runs) and figure.axes:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        across = min(len(labels), 8 if max(map(len, labels)) < 12 else 2 * columns)  # as many as the figure is wide
        figure.legend(handles, labels, loc="outside lower center", ncols=across, frameon=False, fontsize=9)
    write_figure(figure, path, mark)


def plot_study(path: Path, title: str, metric: str, summary: Mapping[str, Mapping[str, Any]]) -> None:
    """A metric over the points of a study, a line per algorithm; points at which every run diverged are left out.

    Bars are one standard deviation, and dotted ones the mean's 95% interval.
    """
    figure = Figure(figsize=(6.4, 4.4), dpi=130, layout="constrained")
    ax = figure.subplots()
    names = list(dict.fromkeys(name for by_name in summary.values() for name in by_name))
    for number, name in enumerate(names):
        found = [(i, by_name[name]) for i, by_name in enumerate(summary.values()) if by_name[name]["mean"] is not None]
        places, means = [i for i, _ in found], [f["mean"] for _, f in found]
        spreads, colour = [f["spread"] for _, f in found], colormaps["tab10"](number % 10)
        halves = [half_interval(f["values"]) or 0.0 for _, f in found]
        ax.errorbar(places, means, spreads, color=colour, marker="o", capsize=3, label=name)
        for bars in ax.errorbar(places, means, halves, fmt="none", ecolor=colour, elinewidth=0.7).lines[2]:
            bars.set_linestyle(":")
    ax.set_xticks(range(len(summary)), [plain(label) for label in summary], fontsize=9)
    ax.set_ylabel(metric.replace("_", " on ", 1))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    ax.set_title(plain(title), fontsize=11, loc="left")
    write_figure(figure, path)


def plot_diagnostics(path: Path, title: str, history: History) -> None:
    """A panel per diagnostic over rounds; those that end in min, mean and max are curves of one panel."""
    panels: dict[str, dict[str, str]] = {}
    for name in _metrics({"": [history]}):
        panel, _, curve = name.rpartition("_") if name.endswith(("_min", "_mean", "_max")) else (name, "", "")
        panels.setdefault(panel, {})[curve] = name
    figure = Figure(figsize=(4.6 * len(panels), 4.2), dpi=130, layout="constrained")
    for ax, (panel, curves) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        for number, (curve, name) in enumerate(curves.items()):
            _curve(ax, [history], name, curve, colormaps["tab10"](number), "-")
        _style(ax, panel.replace("_", " "))
        if len(curves) > 1:
            ax.legend(frameon=False, fontsize=9)
    figure.suptitle(plain(title), fontsize=12, x=0.01, ha="left")
    write_figure(figure, path)


def plot_theory(
    path: Path, alphas: Sequence[float], curves: Mapping[str, tuple[float, NDArray[Any], NDArray[Any]]]
) -> None:
    """A panel per title: the best α, the closed form, and what was measured [seeds, alphas], over α.

    The band is one standard deviation, and the dotted lines are the mean's 95% interval.
    """
    figure = Figure(figsize=(3.4 * len(curves), 3), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(curves), squeeze=False)[0]
    for ax, (title, (best, closed, measured)) in zip(axes, curves.items(), strict=True):
        mean, spread = measured.mean(axis=0), measured.std(axis=0, ddof=min(1, len(measured) - 1))
        half = np.array([half_interval(errors) or 0.0 for errors in measured.T])
        ax.plot(alphas, closed, color="black", label="closed form")
        ax.plot(alphas, mean, "o", markersize=4, color="#d1495b", label="measured")
        ax.fill_between(alphas, mean - spread, mean + spread, color="#d1495b", alpha=0.2)
        for side in (mean - half, mean + half):
            ax.plot(alphas, side, color="#d1495b", linestyle=":", linewidth=0.7)
        ax.axvline(best, linestyle=":", color="grey", label=f"α* = {best:.2f}")
        ax.set(title=title, xlabel="α (1: local, 0: global)")
        ax.set_ylim(bottom=0)
        ax.legend(fontsize=7)
    axes[0].set_ylabel("test error")
    write_figure(figure, path)


def plain(text: str) -> str:
    """Text of a user's that is not a formula, whatever it has between dollar signs."""
    return text.replace("$", r"\$")


def require_format(path: Path) -> None:
    """Refuses a file name that ends as no picture does; one without an ending is a PNG."""
    if path.suffix.lstrip(".").lower() not in ("", *FORMATS):
        raise InputError(f"A picture is a file that ends in .{', .'.join(FORMATS)}, not in '{path.suffix}'.")


def write_figure(figure: Figure, path: Path, mark: Mapping[str, str] | None = None) -> None:
    """The picture as a file, whole or not at all, with a ``mark`` that is not to be seen."""
    require_format(path)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip(".").lower() or "png", metadata=dict(mark or {}))
    write_atomically(path, buffer.getvalue())


def _metrics(runs: Mapping[str, Sequence[History]]) -> list[str]:
    names: dict[str, None] = {}
    for histories in runs.values():
        for history in histories:
            for entry in history:
                names |= dict.fromkeys(name for name in entry if name != "round")
    return list(names)


def _curve(ax: Axes, histories: Sequence[History], metric: str, name: str, colour: Any, style: str) -> None:
    values: dict[int, list[float]] = {}
    for history in histories:
        for entry in history:
            if entry.get(metric) is not None:
                values.setdefault(entry["round"], []).append(entry[metric])
    rounds = sorted(values)
    if not rounds:
        return
    mean = np.array([np.mean(values[r]) for r in rounds])
    spread = np.array([np.std(values[r], ddof=1) if len(values[r]) > 1 else 0.0 for r in rounds])
    marker = "o" if len(rounds) == 1 else None
    ax.plot(rounds, mean, color=colour, linestyle=style, linewidth=1.8, label=name, marker=marker)
    if spread.any():
        ax.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
        half = np.array([half_interval(values[r]) or 0.0 for r in rounds])
        for side in (mean - half, mean + half):
            ax.plot(rounds, side, color=colour, linestyle=":", linewidth=0.7, alpha=0.7)


def _style(ax: Axes, metric: str) -> None:
    ax.set_title(metric.replace("_", " on ", 1), fontsize=11, loc="left")
    ax.set_xlabel("round", fontsize=10, color=GREY)
    ax.tick_params(colors=GREY, labelsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25, linewidth=0.6)
    if metric.startswith(("accuracy", "auc")):
        ax.set_ylim(-0.02, 1.02)
