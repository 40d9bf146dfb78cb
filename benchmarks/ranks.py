"""What two ranks gain, beside what can be gained: ``python benchmarks/ranks.py [--workloads W2,W3] [--turns 3]``.

Each turn times four things, one after another: a workload in one process on one core; the same with half of its clients
a round; the whole in two processes that know nothing of each other, on a core each; and two ranks. The second says what
ranks could gain if they cost nothing, since each has half of the clients. The third says what the machine allows: two
cores share memory, the outer cache and the power of one chip. The name ``loop`` is a loop of small matrix products that
stay in the inner cache; it has neither clients nor ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from measuring import names
from systems import ENVIRONMENT
from workloads import WORKLOADS

LOOP = "loop"
HERE = Path(__file__).parent

COMPUTING = 1.9
"""A workload is bound by computing if half of its clients take 1/1.9 of the time at most.

Two ranks should be 1.8 times as fast as one process there: 1.9, but for 5% that the ranks themselves may cost.
"""


@dataclass(frozen=True)
class Turn:
    """Rounds per second of a workload: in one process, with half of its clients, in two processes, on two ranks."""

    alone: float
    half: float
    apart: float
    ranks: float

    def figures(self) -> dict[str, float]:
        """What is printed; ``fixed`` is the share of a round that does not depend on the number of clients.

        If n clients take f + c·n, half of them take a share h of the time of all, and f is 2h − 1 of that time.
        """
        half = self.alone / self.half
        return {
            "alone": self.alone,
            "half/whole": half,
            "bound": 1 / half,
            "fixed": 2 * half - 1,
            "apart": self.apart / self.alone,
            "ranks": self.ranks / self.alone,
            "ranks/apart": self.ranks / self.apart,
        }


def line(name: str, figures: dict[str, float]) -> str:
    """A line of the table; what was not measured is left out."""
    return f"{name:14}" + "".join(" " * 12 if math.isnan(x) else f"{x:12.2f}" for x in figures.values())


def medians(name: str, turns: Sequence[Turn]) -> str:
    """The last line of a workload: the median of every figure, and whether the workload is bound by computing."""
    every = [turn.figures() for turn in turns]
    middle = {key: median(figures[key] for figures in every) for key in every[0]}
    told = line(f"{name} median", middle)
    if math.isnan(middle["bound"]):
        return told
    return told + f"  {'' if middle['bound'] >= COMPUTING else 'not '}bound by computing"


def rate(spec: str, seconds: float, places: list[list[int]], system: str = "mixfed") -> float:
    """Rounds per second, added up over processes that run at the same time, each on its cores."""
    before = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number, cores in enumerate(places):
            (own := Path(folder, str(number))).mkdir()
            words = [HERE / "one.py", spec, system, str(seconds), str(len(cores)), own]
            if spec == LOOP:
                words = [Path(__file__), "--in", own, "--seconds", str(seconds)]
            os.sched_setaffinity(0, cores)  # which the process inherits
            with (own / "log").open("w") as log:
                command = [sys.executable, *map(str, words)]
                started.append(subprocess.Popen(command, env=os.environ | ENVIRONMENT[system], stdout=log, stderr=log))
        os.sched_setaffinity(0, before)
        for process in started:
            process.wait()
        found = [json.loads(Path(folder, str(i), "result.json").read_text()) for i in range(len(places))]
        return sum(one["rounds_per_second"] for one in found)


def timed(name: str, seconds: float) -> Turn:
    """One turn of a workload."""
    one, other = sorted(os.sched_getaffinity(0))[:2]
    alone = rate(name, seconds, [[one]])
    half = math.nan if name == LOOP else rate(f"{name}:{WORKLOADS[name].clients // 2}", seconds, [[one]])
    apart = rate(name, seconds, [[one], [other]])
    return Turn(alone, half, apart, math.nan if name == LOOP else rate(name, seconds, [[one, other]], "mixfed-ranks"))


def small_products(folder: Path, seconds: float) -> None:
    """Writes how many products of 96 x 96 matrices one core does in a second."""
    torch.set_num_threads(1)
    x, out = torch.randn(96, 96), torch.empty(96, 96)
    done, begins = 0, time.perf_counter() + seconds / 4
    while (now := time.perf_counter()) < begins + seconds:
        for _ in range(100):
            torch.mm(x, x, out=out)
        done += 100 * (now >= begins)
    (folder / "result.json").write_text(json.dumps({"rounds_per_second": done / seconds}))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = {LOOP: None} | WORKLOADS
    parser.add_argument("--workloads", type=names(known), default=[LOOP, "W1", "W2", "W3", "W4"], help="such as W2,W3")
    parser.add_argument("--turns", type=int, default=3, help="how often everything is timed")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long each is timed")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.folder:
        small_products(options.folder, options.seconds)
        return
    print(f"{'workload':14}" + "".join(f"{key:>12}" for key in Turn(1, 1, 1, 1).figures()))
    for name in options.workloads:
        turns = []
        for _ in range(options.turns):
            turns.append(timed(name, options.seconds))
            print(line(name, turns[-1].figures()), flush=True)
        print(medians(name, turns), flush=True)


if __name__ == "__main__":
    main()
