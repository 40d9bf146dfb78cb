"""The one error that a user is meant to read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from typing import Any


class InputError(ValueError):
    """Something the user gave cannot work; the message is one sentence that says what and how to mend it.

    The command line prints the sentence and exits with code 2; it never shows a traceback for this class.
    """


class RunStopped(RuntimeError):
    """A run cannot go on through no fault of its input (every update of a round was NaN, say); one sentence."""


def require_memory(what: str, size: int, way_out: str) -> None:
    """Refuses what takes more bytes than this machine has, with the size that it would need."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > there:
        raise InputError(f"{what} takes {size:,} bytes, and this machine has {there:,} of memory; {way_out}.")


def from_extra(module: str, extra: str, what: str) -> Any:
    """A module that comes with an extra of mixfed, or a sentence that says what needs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(f"{what} needs an extra: pip install 'mixfed[{extra}]'.") from error


OWN = "mixfed_own_"
"""How the names of modules begin that are loaded from files of the user's own."""
WAYS_OUT = {
    "Expected more than 1 value per channel": (
        "; BatchNorm cannot train on a single example, so choose a batch size that leaves no batch of one, "
        "or freeze it with buffers = 'frozen'"
    ),
    "must have the same dtype": "; give numbers in the network's precision, such as with .astype('float32')",
}
"""What helps where torch says this."""


@contextmanager
def explained(what: str, way_out: str = "") -> Iterator[None]:
    """Turns what torch raises on examples that do not fit, and what a user's own code does, into one sentence."""
    try:
        yield
    except (InputError, RunStopped):
        raise
    except KeyError as error:  # a field, mostly
        raise InputError(f"{what}: there is no {error}{way_out}.") from error
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError, TypeError, AttributeError, NameError) as error:
        first, *more = (str(error).strip() or type(error).__name__).splitlines()
        line = f"{first} {more[0].strip()}" if more and first.endswith(":") else first
        line = line.rstrip(".")
        known = next((helps for words, helps in WAYS_OUT.items() if words in line), "")
        raise InputError(f"{what}: {line}{in_own_code(error)}{known or way_out}.") from error


def in_own_code(error: Exception) -> str:
    """The line of the user's own code that failed, if it was that."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    own = [frame for frame in frames if str(frame.f_globals.get("__name__")).startswith(OWN)]
    return f" ({Path(own[-1].f_code.co_filename).name}, line {own[-1].f_lineno})" if own else ""
