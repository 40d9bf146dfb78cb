"""One system on one workload, in a fresh process: ``python one.py W1 torch-loop SECONDS CORES FOLDER``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
from clock import Clock
from systems import SYSTEMS
from workloads import named


def main(workload: str, system: str, seconds: float, cores: int, folder: Path) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    module, options = SYSTEMS[system]
    clock = Clock(seconds)
    try:
        importlib.import_module(f"systems.{module}").run(named(workload), clock, cores, **options)
        result = clock.result()
        torch.save(clock.first, folder / "first.pt")
    except ModuleNotFoundError as missing:
        result = {"error": f"{missing.name} is not installed"}
    except NotImplementedError as absent:
        result = {"error": str(absent), "absent": True}
    except Exception as failure:
        traceback.print_exc()
        result = {"error": f"{type(failure).__name__}: {failure}"}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
