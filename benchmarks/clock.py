"""What a system reports its rounds to: keeps the first round's parameters, the times, and the peak memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median

from torch import Tensor


class Clock:
    """A system calls ``lap`` at the end of every round and stops when it answers False.

    The warm-up lasts at least ``warmup`` rounds (a system that needs more may raise it before its first lap) and a
    quarter of the measured time; then rounds are timed for ``seconds`` and at least three rounds.
    """

    def __init__(self, seconds: float, warmup: int = 2, repeats: int = 5) -> None:
        self.seconds, self.warmup, self.repeats = seconds, warmup, repeats
        self.first: dict[str, Tensor] = {}
        self.memory = 0.0
        self._rounds = 0
        self._started = time.perf_counter()
        self._times: list[float] = []

    def lap(self, params: Callable[[], Mapping[str, Tensor]]) -> bool:
        """Report a finished round; ``params()`` gives the new parameters by name and is called once, in round 1."""
        now = time.perf_counter()
        self._rounds += 1
        if self._rounds == 1:
            self.first = {name: p.detach().clone().contiguous() for name, p in params().items()}
            self._started = time.perf_counter()
        if self._rounds < self.warmup or (not self._times and now - self._started < self.seconds / 4):
            return True
        self._times.append(time.perf_counter() if not self._times else now)
        if len(self._times) < 4 or now - self._times[0] < self.seconds:
            return True
        self.memory = peak_memory()
        return False

    def rates(self) -> list[float]:
        """Rounds per second in each of a few equal parts of the measured rounds."""
        last = len(self._times) - 1
        cuts = sorted({round(last * i / self.repeats) for i in range(self.repeats + 1)})
        return [(b - a) / (self._times[b] - self._times[a]) for a, b in pairwise(cuts)]

    def result(self) -> dict[str, float]:
        """The figures of the table: the median over the parts, the slowest and the fastest part, and the memory."""
        rates = self.rates()
        return {
            "rounds_per_second": median(rates),
            "slowest": min(rates),
            "fastest": max(rates),
            "rounds": len(self._times) - 1,
            "peak_megabytes": self.memory,
        }


def peak_memory() -> float:
    """Peak resident megabytes of this process and its living descendants, added up.

    Read from /proc where there is one: ``ru_maxrss`` of a started process can hold its parent's peak. Pages that
    processes share are counted in each of them.
    """
    if not sys.platform.startswith("linux"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    parents, peaks = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except OSError:  # it ended in the meantime
            continue
        pid = int(fields["Pid"])
        parents[pid] = int(fields["PPid"])
        peaks[pid] = int(fields.get("VmHWM", "0 kB").split()[0]) / 2**10
    total = 0.0
    for pid, peak in peaks.items():
        ancestor = pid
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        total += peak if ancestor else 0.0
    return total
