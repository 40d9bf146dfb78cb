"""What two ranks gain, beside what this machine allows: ``python benchmarks/ranks.py [--workloads W2,W3] [--turns 3]``.

Two cores are not always twice one core: they share memory, the outer cache and the power of one chip. So each turn
times three things, one after another: a workload in one process on one core; the same in two processes that know
nothing of each other, on a core each; and two ranks. The second is the machine's own bound for the third. The name
``loop`` is a loop of small matrix products that stay in the inner cache; it has no ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from measuring import names
from systems import ENVIRONMENT
from workloads import WORKLOADS

LOOP = "loop"
HERE = Path(__file__).parent


def rate(name: str, seconds: float, places: list[list[int]], system: str = "mixfed") -> float:
    """Rounds per second, added up over processes that run at the same time, each on its cores."""
    before = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number, cores in enumerate(places):
            (own := Path(folder, str(number))).mkdir()
            words = [HERE / "one.py", name, system, str(seconds), str(len(cores)), own]
            if name == LOOP:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = {LOOP: None} | WORKLOADS
    parser.add_argument("--workloads", type=names(known), default=[LOOP, "W1", "W2", "W3", "W4"], help="such as W2,W3")
    parser.add_argument("--turns", type=int, default=3, help="how often everything is timed")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long each is timed")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        small_products(options.folder, options.seconds)
        return
    one, other = sorted(os.sched_getaffinity(0))[:2]
    print("workload    alone   two apart  ratio   two ranks  ratio  of the bound")
    for name in options.workloads:
        apart, ranks = [], []
        for _ in range(options.turns):
            alone = rate(name, options.seconds, [[one]])
            both = rate(name, options.seconds, [[one], [other]])
            apart.append(both / alone)
            told = f"{name:8} {alone:8.2f} {both:11.2f} {apart[-1]:6.2f}"
            if name != LOOP:
                two = rate(name, options.seconds, [[one, other]], "mixfed-ranks")
                ranks.append(two / alone)
                told += f" {two:11.2f} {ranks[-1]:6.2f} {two / both:13.2f}"
            print(told, flush=True)
        print(f"{name:8} median {median(apart):20.2f}" + (f" {median(ranks):18.2f}" if ranks else ""), flush=True)


if __name__ == "__main__":
    main()
