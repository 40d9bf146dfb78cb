"""One case: a kind, a seed and a number, from which everything about it follows."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 20
"""Seconds after which a command is asked to stop; a run that is merely long then says how to go on."""
STOPPED = 128 + signal.SIGINT


class Wrong(Exception):
    """The package said that all is well, and it is not; or it refused in a way that helps nobody."""


@dataclass(frozen=True)
class Told:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


class Trial:
    """What a case has at hand: its own random numbers, a folder of its own, and one that all cases share."""

    def __init__(self, name: str, folder: Path, shared: Path) -> None:
        self.name, self.folder, self.shared = name, folder, shared
        self.draw = random.Random(name)

    def one_of(self, choices: Sequence[T]) -> T:
        """One of the choices."""
        return self.draw.choice(choices)

    def note(self, *words: object) -> None:
        """Says what is tried, for whoever repeats the case; it is written at once, as the next step may be the last."""
        print("tried:", *(str(word)[:300] for word in words), flush=True)

    def command(self, *arguments: str | Path, encoding: str = "utf-8") -> Told:
        """Runs the command in this process; whatever it raises goes on to be a traceback."""
        words = [str(a) for a in arguments]
        self.note("mixfed", *(repr(word) for word in words))
        return command(words, encoding)


def command(words: list[str], encoding: str = "utf-8", patience: int = PATIENCE) -> Told:
    """Runs the command ``mixfed`` in this process and catches what it writes; without patience it is never stopped."""
    from mixfed.cli import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.alarm(patience)
    sys.argv, code = ["mixfed", *words], 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        signal.alarm(0)
    for stream in (out, err):
        stream.flush()
    return Told(code, *(stream.buffer.getvalue().decode(encoding) for stream in (out, err)))  # type: ignore[attr-defined]


def judged(told: Told) -> str:
    """Fine, or refused in a sentence."""
    if told.code in (0, STOPPED):
        return "fine"
    if told.code == 2 and "Usage: " in told.err:
        return "refused: usage"
    if told.code not in (1, 2):
        raise Wrong(f"exit code {told.code}: {told.err[-300:]}")
    last = (told.err.strip().splitlines() or [""])[-1]
    if not last.endswith((".", "?", "!")):
        raise Wrong(f"refused, but not in a sentence: {last[-500:]!r}")
    return refusal(last)


def refusal(text: object) -> str:
    """The verdict on a case that was refused with this sentence."""
    sentence = str(text).strip()
    if len(sentence.split()) < 3 or "\n" in sentence or len(sentence) > 2000:
        raise Wrong(f"refused, but not in one sentence: {sentence[:500]!r}")
    return f"refused: {sentence}"


def must_refuse(told: Told) -> str:
    """For what cannot be right: anything but a refusal is wrong."""
    verdict = judged(told)
    if verdict == "fine":
        raise Wrong(f"accepted: {told.out[-200:]}")
    return verdict
