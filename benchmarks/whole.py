"""Where the seconds of one whole command go: ``python benchmarks/whole.py compare digits --algorithms fedavg,mtl``.

The command runs in this process, with a stop-watch around the functions that do its parts. A part's seconds do not
hold those of a part within it: what is imported while the model is evaluated counts as imports. Before that,
``import torch`` is timed in a process of its own, because a run shall reach its first round in one and a half times of
that and one second.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

PARTS = {
    "data": ["mixfed.experiments.scenario:build_scenario"],
    "building": ["mixfed.experiments.build:build", "mixfed.backends.run:run"],
    "choosing": ["mixfed.backends.simulator.choice:Chooser.how"],
    "training": ["mixfed.core.loop:_one_round"],
    "evaluation": ["mixfed.core.loop:Evaluation.after"],
    "checkpoints": ["mixfed.core.checkpoint:Checkpoints.save"],
    "probe": ["mixfed.experiments.probing:predict"],
    "report": [
        "mixfed.experiments.running:_write_result",
        "mixfed.experiments.report.plot:plot_comparison",
        "mixfed.experiments.report.tables:comparison_tables",
        "mixfed.experiments.report.page:write_report",
    ],
}
"""The functions that do a part, each by its module and name."""


class Watch:
    """Seconds by part, and the moments of the first round; an inner part stops the outer one's clock."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.moments: dict[str, float] = {}
        self._running = ["the rest"]
        self._since = self._started = time.perf_counter()

    def turn(self) -> None:
        """Adds what passed to the part that ran."""
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*positional: Any, **named: Any) -> Any:
            self.turn()
            if part == "training":
                self.moments.setdefault("first round begins", self._since - self._started)
            self._running.append(part)
            try:
                return function(*positional, **named)
            finally:
                self.turn()
                self._running.pop()
                if part == "training":
                    self.moments.setdefault("first round ends", self._since - self._started)

        return timed


class AfterImport:
    """Puts the stop-watch around functions as soon as their module is there; many are imported late."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.waiting = {place: part for part, places in PARTS.items() for place in places}

    def __call__(self) -> None:
        for place, part in list(self.waiting.items()):
            module, _, path = place.partition(":")
            owner: Any = sys.modules.get(module)
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent, None)
            if owner is not None and hasattr(owner, name):
                del self.waiting[place]
                setattr(owner, name, self.watch.of(part, getattr(owner, name)))


def watched(arguments: list[str]) -> Watch:
    """Runs the command to its end."""
    watch = Watch()
    wrap = AfterImport(watch)
    plain = watch.of("imports", builtins.__import__)

    def imported(name: str, *rest: Any, **named: Any) -> Any:
        found = plain(name, *rest, **named)
        if name.startswith("mixfed"):
            wrap()
        return found

    builtins.__import__ = imported
    importlib.import_module = watch.of("imports", importlib.import_module)
    from mixfed.cli import ENVIRONMENT, app, os

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.argv = ["mixfed", *arguments]
    try:
        app(arguments)
    except SystemExit as end:
        if end.code:
            raise
    watch.turn()
    return watch


def main() -> None:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    torch = time.perf_counter() - begun
    watch = watched(sys.argv[1:])
    print(f"\n{'part':<12} seconds")
    for part, seconds in watch.seconds.most_common():
        print(f"{part:<12} {seconds:7.2f}")
    print(f"{'all':<12} {sum(watch.seconds.values()):7.2f}\n")
    for moment, seconds in watch.moments.items():
        print(f"{moment} after {seconds:.2f} s")
    print(f"import torch takes {torch:.2f} s, so the first round should begin within {1.5 * torch + 1:.2f} s")
    print(json.dumps({"parts": watch.seconds, "moments": watch.moments, "torch": torch}))


if __name__ == "__main__":
    main()
