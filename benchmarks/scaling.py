"""Rounds per second and memory as the cohort grows, and as the population does: ``python benchmarks/scaling.py``.

The work is that of ``run.py``, with 10 to 10,000 clients a round of 10⁴, and with 100 a round of 10³ to 10⁶. A round's
cost should follow the cohort and not the population. Every system has the same examples: a file that is mapped into
memory, in which the examples of 1,000 clients repeat. A file that would be larger than ``LARGEST`` is made of holes,
which read as zeros.

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
from workloads import FOLDER, WORKLOADS, Workload, file_of, named

COHORTS = (10, 100, 1_000, 10_000)
POPULATIONS = (1_000, 10_000, 100_000, 1_000_000)
USUAL_COHORT, USUAL_POPULATION = 100, 10_000
LARGEST = 2 * 10**9
OWN = "mixfed"


def write(workload: Workload, population: int) -> None:
    """The population's examples, in files."""
    for field, pool in zip("xy", workload.data(), strict=True):
        file, size = file_of(workload.name, population, field), pool.nbytes // len(pool) * population
        with file.open("wb") as out:
            for _ in range(population // len(pool) if size <= LARGEST else 0):
                out.write(pool.numpy().data)
            out.truncate(size)


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
        for population in (p for p in POPULATIONS if p <= options.most):
            cohorts = [c for c in COHORTS if population == USUAL_POPULATION or c == USUAL_COHORT]
            with tempfile.TemporaryDirectory() as folder, console.status("") as status:
                os.environ[FOLDER] = folder
                write(WORKLOADS[name], population)
                for cohort in cohorts:
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
