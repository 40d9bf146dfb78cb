"""Who holds what, in one picture: labels per client, client sizes, and the centre beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from mixfed.data.store import CentralData, FederatedData
from mixfed.experiments.ownership import shares
from mixfed.experiments.report.plot import GREY, plain, write_figure

Colours = list[Any]


def plot_holdings(
    data: FederatedData,
    path: str | Path,
    central: CentralData | None = None,
    field: str = "y",
    max_clients: int = 60,
    names: tuple[str, ...] | None = None,
) -> None:
    """Draw the labels of (at most ``max_clients``) clients, the sizes of all, and the labels at the centre.

    Where there are more clients, those shown are spread evenly over the list. More than 20 different labels are
    drawn as 20 ranges. ``names`` gives words for the labels 0, 1, ….
    """
    found = shares(data, central, field, max_clients, names)
    words = [plain(word) for word in found.words]
    colours = _colours(len(words))

    figure = Figure(figsize=(12.5, 5.4), dpi=130, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1)  # type: ignore[union-attr,call-arg]
    widths = [4.2, 1.25] if central is None else [4.2, 1.25, 1.25]
    axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    _draw_clients(axes[0], found.table, found.shown, colours, data.clients)
    _draw_sizes(axes[1], found.sizes)
    if found.centre is not None:
        _draw_centre(axes[2], found.centre, words, colours)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(colors=GREY, labelsize=9)
    handles = [Patch(color=colour, label=word) for colour, word in zip(colours, words, strict=True)]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(words), 10), frameon=False, fontsize=9,
        handlelength=1, columnspacing=1.2,
    )  # fmt: skip
    write_figure(figure, Path(path))


def _draw_clients(ax: Axes, table: NDArray[np.int64], shown: NDArray[np.int64], colours: Colours, clients: int) -> None:
    """Stacked bars, one per client shown, the first label at the bottom."""
    positions = np.arange(len(shown))
    below = np.zeros(len(shown), np.int64)
    for number, colour in enumerate(colours):
        ax.bar(positions, table[:, number], 0.86, bottom=below, color=colour, linewidth=0)
        below += table[:, number]
    ticks = np.unique(np.linspace(0, len(shown) - 1, min(len(shown), 12)).round().astype(np.int64))
    ax.set_xticks(ticks, [f"{shown[tick]:,}" for tick in ticks])
    ax.set_xlim(-0.7, len(shown) - 0.3)
    told = f"all {clients:,} clients" if len(shown) == clients else f"{len(shown)} of {clients:,} clients"
    ax.yaxis.set_major_formatter("{x:,.0f}")
    _titles(ax, f"What each client holds: {told}", "client", "examples")


def _draw_sizes(ax: Axes, sizes: NDArray[np.int64]) -> None:
    """How many clients have how many examples; on a logarithmic axis where sizes span more than a factor of 50."""
    low, high = int(sizes.min()), int(sizes.max())
    wide = low > 0 and high > 50 * low
    if wide:
        edges = np.geomspace(low, high + 1, 21)
        ax.set_xscale("log")
    else:
        edges = np.linspace(low - 0.5, high + 0.5, min(high - low + 1, 20) + 1)
    ax.hist(sizes, edges.tolist(), color="#7f97b2", edgecolor="white", linewidth=0.6)
    median = float(np.median(sizes))
    ax.axvline(median, color=GREY, linewidth=1.2, linestyle="--")
    ax.locator_params(axis="y", nbins=5, integer=True)
    if not wide:
        ax.locator_params(axis="x", nbins=4, integer=True)
    _titles(ax, f"Client sizes: median {median:,.0f}", "examples", "clients")


def _draw_centre(ax: Axes, counts: NDArray[np.int64], words: list[str], colours: Colours) -> None:
    """One bar per label, in the colours of the clients' bars."""
    positions = np.arange(len(words))
    ax.barh(positions, counts, 0.8, color=colours)
    ax.set_yticks(positions, words)
    ax.locator_params(axis="x", nbins=3, integer=True)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    _titles(ax, f"The centre: {counts.sum():,}", "examples", "")


def _titles(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=11, loc="left")
    ax.set_xlabel(x, fontsize=10, color=GREY)
    ax.set_ylabel(y, fontsize=10, color=GREY)


def _colours(count: int) -> Colours:
    """Distinct colours for few labels, an ordered scale for many."""
    if count <= 10:
        return [colormaps["tab10"](number) for number in range(count)]
    return [colormaps["turbo"](0.06 + 0.88 * number / (count - 1)) for number in range(count)]
