"""One system on one workload, in a fresh process with an environment of its own."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import reference
import torch
from systems import ENVIRONMENT, PYTHON
from torch import Tensor
from workloads import Workload

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]


def measure(workload: Workload, system: str, options: argparse.Namespace, wanted: dict[str, Tensor] | None) -> Row:
    """Its figures, or what went wrong; ``wanted`` is what the parameters must be after the first round."""
    python = ROOT / PYTHON.get(system, sys.executable)
    if not python.exists():
        return {"error": f"its environment {PYTHON[system]} is not there; make bench makes it"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [workload.spec, system, str(options.seconds), str(options.cores), folder]
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(python), str(Path(__file__).with_name("one.py")), *command],
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
        if "error" not in row and wanted is not None:
            row["deviation"] = reference.error(workload, wanted, torch.load(Path(folder, "first.pt")))
            row["correct"] = row["deviation"] <= reference.TOLERANCE
        return row


def names(known: dict[str, Any]) -> Callable[[str], list[str]]:
    """Reads names with commas between."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - known.keys():
            raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return chosen

    return parse


def add_options(parser: argparse.ArgumentParser, seconds: float, timeout: float) -> None:
    """How each system is timed."""
    parser.add_argument("--seconds", type=float, default=seconds, help="how long to time each system in a turn")
    parser.add_argument("--cores", type=int, default=2, help="cores that each system may use")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds after which a system is given up")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--verbose", action="store_true", help="show what the systems print")
