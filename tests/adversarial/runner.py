"""Runs cases, each in a process of its own, and counts how they end."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from tests.adversarial import compositions, files, folders, kills, misuse, options, own, recipes
from tests.adversarial.trial import Trial, Wrong
from tests.warm import Process

KINDS: dict[str, Callable[[Trial], str]] = {
    "recipe": recipes.case,
    "option": options.case,
    "file": files.case,
    "folder": folders.case,
    "kill": kills.case,
    "pair": kills.pair,
    "composition": compositions.case,
    "misuse": misuse.case,
    "own": own.case,
}
ORDER = (
    "composition", "recipe", "file", "folder", "composition", "misuse", "recipe", "file", "option", "composition",
    "recipe", "file", "composition", "misuse", "recipe", "kill", "composition", "file", "recipe", "composition",
    "folder", "file", "misuse", "composition", "recipe", "pair", "file", "option", "composition", "own",
)  # fmt: skip
"""Which kind comes when: those that cost little come more often."""
GOOD = ("fine", "refused")
BAD = ("traceback", "signal", "wrong", "hang")
LIMIT = 120.0
"""Seconds after which a case counts as hanging."""
MEMORY = 4 << 30


@dataclass(frozen=True)
class Outcome:
    """How a case ended: one of ``GOOD`` or ``BAD``, and why."""

    case: str
    ending: str
    told: str
    seconds: float

    @property
    def kind(self) -> str:
        """The kind of the case."""
        return self.case.split("-")[0]


def cases(seed: int, only: str | None = None) -> Iterator[str]:
    """Endless names of cases."""
    for number in count():
        kind = only or ORDER[number % len(ORDER)]
        yield f"{kind}-{seed}-{number}"


def attempt(case: str, folder: str, shared: str) -> None:
    """Runs one case in this process and prints its verdict as the last line."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ |= {"XDG_CACHE_HOME": str(Path(shared) / "cache"), "COLUMNS": "100", "MIXFED_DATA": ""}
    os.chdir(folder)
    try:
        verdict = KINDS[case.split("-")[0]](Trial(case, Path(folder), Path(shared)))
    except Wrong as error:
        verdict = f"wrong: {error}"
    print(verdict.replace("\n", " "), flush=True)


class Running:
    """A case at work."""

    def __init__(self, case: str, shared: Path) -> None:
        self.case = case
        self.folder = tempfile.mkdtemp(prefix="mixfed-case-")
        self.start = time.monotonic()
        self.process = Process(attempt, case, self.folder, str(shared))

    def ended(self) -> Outcome | None:
        """How it ended, or None while it runs."""
        code, seconds = self.process.poll(), time.monotonic() - self.start
        if code is None and seconds < LIMIT:
            return None
        if code is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(LIMIT)
        out, err = self.process.told()
        shutil.rmtree(self.folder, ignore_errors=True)
        if code is None:
            return Outcome(self.case, "hang", out, seconds)
        if code < 0:
            return Outcome(self.case, "signal", f"{out}{signal.Signals(-code).name}\n{err}", seconds)
        last = out.rstrip().rpartition("\n")[2]
        ending = last.partition(":")[0]
        if code > 0 or ending not in (*GOOD, *BAD):
            return Outcome(self.case, "traceback", out + err, seconds)
        return Outcome(self.case, ending, out + err, seconds)


def run(names: Iterator[str], *, most: int | None, seconds: float, workers: int) -> Iterator[Outcome]:
    """Runs the cases, so many at once, until there are no more or the time is over."""
    end = time.monotonic() + seconds
    waiting = islice(names, most)
    running: list[Running] = []
    with tempfile.TemporaryDirectory(prefix="mixfed-trial-", ignore_cleanup_errors=True) as shared:
        while True:
            while len(running) < workers and time.monotonic() < end and (case := next(waiting, None)):
                running.append(Running(case, Path(shared)))
            if not running:
                return
            for one in list(running):
                if outcome := one.ended():
                    running.remove(one)
                    yield outcome
            time.sleep(0.005)


def table(outcomes: list[Outcome]) -> str:
    """Counts by kind and ending, as text."""
    counts = Counter((outcome.kind, outcome.ending) for outcome in outcomes)
    columns = (*GOOD, *BAD)
    lines = [f"{'kind':<12}" + "".join(f"{name:>10}" for name in (*columns, "all"))]
    for kind in [*(k for k in KINDS if any(o.kind == k for o in outcomes)), "all"]:
        row = [sum(n for (k, e), n in counts.items() if kind in (k, "all") and e == column) for column in columns]
        lines.append(f"{kind:<12}" + "".join(f"{n:>10}" for n in (*row, sum(row))))
    return "\n".join(lines)
