"""Rounds per second and memory as the cohort grows, and as the population does: ``python benchmarks/scaling.py``.

The work is that of ``run.py``, with 10 to 10,000 clients a round of 10⁴, and with 100 a round of 10³ to 10⁶. A round's
cost should follow the cohort and not the population. Every system has the same examples, and those of 4,096 clients
repeat in them (``repeated.py``), so that nobody waits for a disk.

So that all of it takes minutes, peers have the usual and the largest population only, and a system that is not done in
time with a cohort is not tried with larger ones.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile

from measuring import Row, add_options, measure, names
from rich.console import Console
from rich.table import Table
from systems import SYSTEMS
from workloads import FOLDER, WORKLOADS, Workload, named, write

COHORTS = (10, 100, 1_000, 10_000)
POPULATIONS = (1_000, 10_000, 100_000, 1_000_000)
USUAL_COHORT, USUAL_POPULATION = 100, 10_000
OWN = "mixfed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=names(WORKLOADS), default=["W1", "W4"])
    parser.add_argument("--systems", type=names(SYSTEMS), default=[OWN, "pfl", "flower", "fedjax"])
    parser.add_argument("--most", type=int, default=POPULATIONS[-1], help="the largest population")
    add_options(parser, seconds=0.5, timeout=25.0)
    options = parser.parse_args()
    found: dict[str, dict[str, Row]] = {}
    console = Console()
    console.width = max(console.width, 110)
    for name in options.workloads:
        late: dict[str, Row] = {}
        with tempfile.TemporaryDirectory() as folder, console.status("") as status:
            os.environ[FOLDER] = folder
            write(WORKLOADS[name])
            for cohort, population in sizes(options.most):
                workload = named(f"{name}:{cohort}:{population}")
                rows = found[workload.spec] = {}
                for system in options.systems:
                    if system != OWN and population not in (USUAL_POPULATION, options.most):
                        continue
                    status.update(f"{workload.spec} {system}")
                    larger = population == USUAL_POPULATION and system in late
                    rows[system] = late[system] if larger else measure(workload, system, options, None)
                    if population == USUAL_POPULATION and _is_late(rows[system]):
                        late[system] = rows[system]
        cells = {spec: rows for spec, rows in found.items() if spec.startswith(name)}
        console.print(table(WORKLOADS[name], cells, options.systems), "")
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


def sizes(most: int) -> list[tuple[int, int]]:
    """Every cohort of the usual population, and the usual cohort of every population."""
    return [
        (cohort, population)
        for population in POPULATIONS
        for cohort in COHORTS
        if population <= most and (population == USUAL_POPULATION or cohort == USUAL_COHORT)
    ]


def table(workload: Workload, cells: dict[str, dict[str, Row]], systems: list[str]) -> Table:
    """A row for each size, a column for each system."""
    answer = Table(title=f"{workload.name} {workload.title}: rounds/s (peak MB)", title_justify="left")
    for heading in ("a round", "of", *systems):
        answer.add_column(heading, justify="right", no_wrap=True)
    for spec, rows in sorted(cells.items(), key=lambda cell: [int(n) for n in reversed(cell[0].split(":")[1:])]):
        _, cohort, population = spec.split(":")
        answer.add_row(f"{int(cohort):,}", f"{int(population):,}", *(_cell(rows.get(system)) for system in systems))
    return answer


def _is_late(row: Row) -> bool:
    return str(row.get("error", "")).startswith("not done")


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return row["error"] if _is_late(row) else "cannot"
    return f"{row['rounds_per_second']:.2f} ({row['peak_megabytes']:,.0f})"


if __name__ == "__main__":
    main()
