"""The same rounds on one system after another: ``python benchmarks/run.py [--workloads W1,W2] [--systems a,b]``.

Every system runs in a process of its own, alone, on the same cores; its parameters after the first round are checked
against ``reference.py``. The machine's speed drifts within minutes, so the systems take turns, several times over. A
ratio is to the best hand-written code in one process, in the same turn; it is shown as the median over the turns with
the least and the most of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import reference
from measuring import Row, add_options, measure, names
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from systems import BASELINES, QUICK, SYSTEMS
from workloads import STANDARD, WORKLOADS, Workload


def summary(turns: dict[str, list[Row]]) -> dict[str, Row]:
    """One row for each system: medians over its turns, and ratios to the best correct hand-written code, turn by turn.

    The best is the one with the highest median, so that nobody is compared with a lucky turn of another.
    """
    rows: dict[str, Row] = {}
    for system, found in turns.items():
        wrong = next((row for row in found if "error" in row), None)
        rows[system] = wrong or {
            "rounds_per_second": median(row["rounds_per_second"] for row in found),
            "slowest": min(row["slowest"] for row in found),
            "fastest": max(row["fastest"] for row in found),
            "peak_megabytes": max(row["peak_megabytes"] for row in found),
            "deviation": max(row["deviation"] for row in found),
            "correct": all(row["correct"] for row in found),
            "turns": [row["rounds_per_second"] for row in found],
        }
    usable = [s for s in BASELINES if rows.get(s, {}).get("correct")]
    if usable:
        best = rows[max(usable, key=lambda s: rows[s]["rounds_per_second"])]["turns"]
        for row in rows.values():
            if "turns" in row:
                row["ratios"] = [ours / theirs for ours, theirs in zip(row["turns"], best, strict=True)]
                row["ratio"] = median(row["ratios"])
    return rows


def table(workload: Workload, rows: dict[str, Row]) -> Table:
    """The rows of one workload."""
    shape = f"{workload.clients} clients a round, batch {workload.batch}, {workload.steps} steps"
    answer = Table(title=f"{workload.name} {workload.title}: {shape}", title_justify="left")
    answer.add_column("system", no_wrap=True)
    for heading in ("rounds/s", "slowest..fastest", "ratio", "least..most", "peak MB"):
        answer.add_column(heading, justify="right", no_wrap=True)
    answer.add_column("first round", overflow="fold")
    for system, row in rows.items():
        if "error" in row:
            answer.add_row(system, *"-----", escape(row["error"]), style="dim" if row.get("absent") else "red")
            continue
        verdict = f"{row['deviation']:.0e}"
        answer.add_row(
            system,
            f"{row['rounds_per_second']:.2f}",
            f"{row['slowest']:.2f}..{row['fastest']:.2f}",
            f"{row['ratio']:.2f}" if "ratio" in row else "-",
            f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}" if "ratio" in row else "-",
            f"{row['peak_megabytes']:.0f}",
            f"ok {verdict}" if row["correct"] else f"[red]WRONG {verdict}",
        )
    return answer


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    versions = {}
    for package in ("torch", "numpy", "pfl", "flwr", "ray", "fedjax", "jax", "mixfed"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "versions": versions,
        "cores": options.cores,
        "cores_of_machine": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "seconds": options.seconds,
        "turns": options.turns,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=names(WORKLOADS), default=list(STANDARD), help="such as W1,W2")
    parser.add_argument("--systems", type=names(SYSTEMS), default=list(SYSTEMS), help="such as torch-loop,pfl")
    parser.add_argument("--turns", type=int, default=3, help="how often each system has its turn")
    parser.add_argument("--quick", action="store_true", help="mixfed and the best hand-written code, two short turns")
    add_options(parser, seconds=3.0, timeout=300.0)
    options = parser.parse_args()
    if options.quick:
        options.systems, options.seconds, options.turns = list(QUICK), 1.0, 2

    console = Console()
    console.width = max(console.width, 110)
    setting = machine(options)
    console.print(" ".join(f"{name} {v}" for name, v in setting["versions"].items() if v))
    console.print(f"{options.cores} cores of {setting['cores_of_machine']}, load {setting['load_before']:.1f}\n")
    results: dict[str, dict[str, Row]] = {}
    for workload in (WORKLOADS[name] for name in options.workloads):
        with console.status(f"{workload.name} reference") as status:
            rows = results[workload.name] = summary(take_turns(workload, options, status.update))
        console.print(table(workload, rows), "")
        if options.json:
            options.json.write_text(json.dumps({"machine": setting, "results": results}, indent=2) + "\n")
    return int(any(row.get("correct") is False for rows in results.values() for row in rows.values()))


def take_turns(workload: Workload, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, list[Row]]:
    """What each system measured in each of its turns; one that cannot run has one turn."""
    wanted = reference.first_round(workload)
    turns: dict[str, list[Row]] = {system: [] for system in options.systems}
    for turn in range(options.turns):
        for system, found in turns.items():
            if not any("error" in row for row in found):
                say(f"{workload.name} {system}, turn {turn + 1} of {options.turns}")
                found.append(measure(workload, system, options, wanted))
    return turns


if __name__ == "__main__":
    sys.exit(main())
