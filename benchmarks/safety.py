"""What safety costs: the share of ``mixfed compare digits`` that locks, checksums and checks take.

The methods of ``make demo`` are compared in this process, while every function that only guards a run is timed. What
such a function calls is timed with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.table import Table

GUARDS = {
    "locks and links": ["core.files:refuse_links", "core.files:sweep", "experiments.folder:RunFolder._take_lock"],
    "checksums and identity": [
        "core.checkpoint:_check_seal",
        "core.checkpoint:_sealed",
        "core.private_rows:ClientRows._sums_of",
        "experiments.folder:_sealed",
        "experiments.folder:_unsealed",
        "experiments.folder:identity",
    ],
    "checks of data and settings": [
        "core.checks:check_data",
        "core.checks:check_settings",
        "core.compatible:check_compatible",
        "experiments.limits:require_room_for_batches",
    ],
    "norms of updates": [
        "backends.simulator.gathered:Gathered._add_factors",
        "backends.work:norm_of",
        "backends.work:norms_of",
        "core.faults:Faults.note",
    ],
}
METHODS = ["fedavg", "transfer", "parallel", "example_transfer", "gradient_1way", "gradient_2way", "oracle"]


class Timer:
    """Seconds and calls by guard; inside of one the others are not timed again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inside = threading.local()

    def timed(self, guard: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **options: Any) -> Any:
            if getattr(self._inside, "it", False):
                return function(*given, **options)
            self._inside.it, start = True, time.perf_counter()
            try:
                return function(*given, **options)
            finally:
                self._inside.it = False
                self.seconds[guard] += time.perf_counter() - start
                self.calls[guard] += 1

        return wrapped

    def install(self) -> None:
        """Puts a timed function in every place that has the function by its name."""
        for guard, names in GUARDS.items():
            for name in names:
                module, _, path = name.partition(":")
                owner: Any = import_module(f"mixfed.{module}")
                *classes, last = path.split(".")
                for part in classes:
                    owner = getattr(owner, part)
                plain = getattr(owner, last)
                places = [owner] if classes else [m for n, m in list(sys.modules.items()) if n.startswith("mixfed.")]
                for place in places:
                    if vars(place).get(last) is plain:
                        setattr(place, last, self.timed(guard, plain))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="of every method (those of the recipe by default)")
    given = parser.parse_args()
    import mixfed.backends.run
    import mixfed.experiments.compare  # so that every module is there to be timed
    from mixfed.experiments.request import Request

    timer = Timer()
    timer.install()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        recipes = Request("digits", rounds=given.rounds).recipes(METHODS, seeds=[0])
        mixfed.experiments.compare.compare(recipes, folder)
        whole = time.perf_counter() - start
    table = Table("guard", "calls", "ms", "share of the run", title=f"mixfed compare digits: {whole:.2f} s")
    for guard in GUARDS:
        seconds = timer.seconds[guard]
        table.add_row(guard, f"{timer.calls[guard]:,}", f"{1e3 * seconds:.1f}", f"{100 * seconds / whole:.2f}%")
    total = sum(timer.seconds.values())
    table.add_row("all", f"{sum(timer.calls.values()):,}", f"{1e3 * total:.1f}", f"{100 * total / whole:.2f}%")
    Console().print(table)


if __name__ == "__main__":
    main()
