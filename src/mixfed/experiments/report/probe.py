"""The probe's picture and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from mixfed.evaluate.probe.advice import LARGE, Advice
from mixfed.evaluate.probe.dissimilarity import Dissimilarity
from mixfed.experiments.report.plot import plain, write_figure
from mixfed.experiments.report.tables import figure

_TITLES = {
    "G2": "G̃²: gradient dissimilarity",
    "B2": "B̃²: relative to ‖∇f‖²",
    "sigma2": "σ²: variance of a client batch",
    "sigma_c2": "σ_c²: variance of a central batch",
}


def plot_probe(path: Path, title: str, found: Dissimilarity) -> None:
    """What was measured over rounds: every repeat, and the maximum over repeats as the paper plots it."""
    picture = Figure(figsize=(9.2, 6.4), dpi=130, layout="constrained")
    for ax, (name, heading) in zip(picture.subplots(2, 2).flat, _TITLES.items(), strict=True):
        values = found.measured[name]
        rounds = np.arange(1, values.shape[1] + 1)
        ax.plot(rounds, values.T, color="#9ab", linewidth=0.8, alpha=0.7)
        ax.plot(rounds, values.max(axis=0), color="#1f4e79", linewidth=1.8, label="maximum over repeats")
        ax.axvline(found.first_round, color="#999999", linewidth=0.8, linestyle=":")
        ax.set_title(heading, fontsize=11, loc="left")
        ax.set_xlabel("round", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
        if (values > 0).any():
            ax.set_yscale("log")
    picture.suptitle(plain(title), fontsize=12, x=0.01, ha="left")
    write_figure(picture, path)


def probe_table(found: Dissimilarity) -> Table:
    """Maximum and median of what was measured."""
    repeats, rounds = found.measured["G2"].shape
    table = Table(title=f"{repeats} × {rounds} rounds, K = 1, from round {found.first_round + 1} on")
    for heading in ("", "max", "median"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, heading in _TITLES.items():
        table.add_row(heading, f"{found.largest(name):.3g}", f"{found.typical(name):.3g}")
    return table


def probe_words(advice: Advice) -> str:
    """The advice in plain words."""
    return "\n".join([f"Advice: {advice.algorithm}.", *(f"- {reason}" for reason in advice.reasons)])


def prediction_words(probe: Mapping[str, Any], algorithms: Mapping[str, Any], mixed: Sequence[str]) -> str:
    """What the probe predicted of the mixed methods, beside the losses that they reached."""
    unlike = probe["max"]["G2"] >= LARGE
    expected = "the transfers ahead of parallel training" if unlike else "all mixed methods alike"
    losses = {name: algorithms[name]["metrics"].get("loss", {}).get("mean") for name in mixed}
    reached = ", ".join(f"{name} {figure(loss)}" for name, loss in losses.items())
    right = predicted_right(unlike, losses)
    verdict = "" if right is None else f"\nVerdict: predicted {'right' if right else 'wrong'}."
    return (
        f"Predicted by a short probe: max G̃² = {probe['max']['G2']:.3g}, so {expected}; advice"
        f" {probe['advice']['algorithm']}.\nHappened (loss): {reached}.{verdict}"
    )


def predicted_right(unlike: bool, losses: Mapping[str, float | None]) -> bool | None:
    """Whether the transfers were ahead of parallel training (where gradients are unlike), or all within a tenth.

    None where parallel training or all transfers have no loss to compare.
    """
    parallel = losses.get("parallel")
    others = [loss for name, loss in losses.items() if name != "parallel" and loss is not None]
    if parallel is None or not others:
        return None
    return min(others) < parallel if unlike else abs(min(others) - parallel) <= 0.1 * abs(parallel)
