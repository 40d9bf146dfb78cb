"""The same rounds on one system after another: ``python benchmarks/run.py [--workloads W1,W2] [--systems a,b]``.

Every system runs in a process of its own, alone, on the same cores; its parameters after the first round are checked
against ``reference.py``. Rates are medians; ratios refer to the best hand-written code in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import reference
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from systems import BASELINES, ENVIRONMENT, SYSTEMS
from torch import Tensor
from workloads import WORKLOADS, Workload

Row = dict[str, Any]


def measure(workload: Workload, system: str, wanted: dict[str, Tensor], options: argparse.Namespace) -> Row:
    """One row: the figures of a fresh process, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [workload.name, system, str(options.seconds), str(options.cores), folder]
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("one.py")), *command],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | ENVIRONMENT.get(system, {}),
            )  # fmt: skip
            try:
                process.wait(options.timeout)
            except subprocess.TimeoutExpired:
                return {"error": f"not done after {options.timeout:g} s"}
            finally:
                if process.poll() is None:  # too slow, or interrupted
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if options.verbose:
            print(log.read_text())
        result = Path(folder, "result.json")
        if not result.exists():
            return {"error": f"ended with code {process.returncode}: {log.read_text().strip()[-200:]}"}
        row: Row = json.loads(result.read_text())
        if "error" not in row:
            row["deviation"] = reference.error(workload, wanted, torch.load(Path(folder, "first.pt")))
            row["correct"] = row["deviation"] <= reference.TOLERANCE
        return row


def table(workload: Workload, rows: dict[str, Row]) -> Table:
    """The rows of one workload, with ratios to the best correct hand-written code in one process."""
    best = max((rows[s]["rounds_per_second"] for s in BASELINES if rows.get(s, {}).get("correct")), default=None)
    shape = f"{workload.clients} clients a round, batch {workload.batch}, {workload.steps} steps"
    answer = Table(title=f"{workload.name} {workload.title}: {shape}", title_justify="left")
    answer.add_column("system", no_wrap=True)
    for heading in ("rounds/s", "slowest..fastest", "ratio", "peak MB"):
        answer.add_column(heading, justify="right", no_wrap=True)
    answer.add_column("first round", overflow="fold")
    for system, row in rows.items():
        if "error" in row:
            answer.add_row(system, "-", "-", "-", "-", f"[red]ERROR {escape(row['error'])}")
            continue
        rate = row["rounds_per_second"]
        row["ratio"] = rate / best if best else None
        verdict = f"{row['deviation']:.0e}"
        answer.add_row(
            system,
            f"{rate:.2f}",
            f"{row['slowest']:.2f}..{row['fastest']:.2f}",
            f"{row['ratio']:.2f}" if best else "-",
            f"{row['peak_megabytes']:.0f}",
            f"ok {verdict}" if row["correct"] else f"[red]WRONG {verdict}",
        )
    return answer


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    versions = {}
    for package in ("torch", "numpy", "pfl", "flwr", "ray", "mixfed"):
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
    }


def names(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - known.keys():
            raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return chosen

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", type=names(WORKLOADS), default=list(WORKLOADS), help="such as W1,W2")
    parser.add_argument("--systems", type=names(SYSTEMS), default=list(SYSTEMS), help="such as torch-loop,pfl")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long to time each system")
    parser.add_argument("--cores", type=int, default=2, help="cores that each system may use")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a system is given up")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--verbose", action="store_true", help="show what the systems print")
    options = parser.parse_args()

    console = Console()
    console.width = max(console.width, 110)
    setting = machine(options)
    console.print(" ".join(f"{name} {v}" for name, v in setting["versions"].items() if v))
    console.print(f"{options.cores} cores of {setting['cores_of_machine']}, load {setting['load_before']:.1f}\n")
    results: dict[str, dict[str, Row]] = {}
    for workload in (WORKLOADS[name] for name in options.workloads):
        rows = results[workload.name] = {}
        with console.status("") as status:
            status.update(f"{workload.name} reference")
            wanted = reference.first_round(workload)
            for system in options.systems:
                status.update(f"{workload.name} {system}")
                rows[system] = measure(workload, system, wanted, options)
        console.print(table(workload, rows), "")
        if options.json:
            options.json.write_text(json.dumps({"machine": setting, "results": results}, indent=2) + "\n")
    return int(any(row.get("correct") is False for rows in results.values() for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
