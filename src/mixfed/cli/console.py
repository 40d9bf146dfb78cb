"""Standard output and standard error. What users named is shown as it is: brackets in it are no markup."""

from __future__ import annotations

import contextlib
import io
import logging
import sys

from rich.console import Console

stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)
notes = Console(stderr=True, highlight=False, markup=False, emoji=False)
"""Progress and remarks, which ``--quiet`` hides."""
stdout = Console(highlight=False, markup=False, emoji=False)

_OPENERS = frozenset(("a", "an", "each", "every", "no", "the", "there", "this"))
"""Words that begin a sentence and are no name of a file, a setting or an algorithm."""


def sentence(text: object) -> None:
    """One sentence for the user, on standard error, in one piece however narrow the terminal."""
    words = " ".join(str(text).split())
    if words.partition(" ")[0] in _OPENERS:
        words = words[0].upper() + words[1:]
    stderr.print(words if words.endswith((".", "?", "!")) else words + ".", style="bold red", soft_wrap=True)


def be_quiet(quiet: bool) -> None:
    """Whether this process prints nothing, because another one of the same run does."""
    stdout.quiet = stderr.quiet = notes.quiet = quiet


def tell_more_or_less(*, quiet: bool, verbose: bool) -> None:
    """Hides progress and remarks, or shows what the package logs on its way as well."""
    notes.quiet = quiet
    logging.getLogger("mixfed").setLevel(logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING)


def show_what_can_be_shown() -> None:
    """Lets a terminal show a question mark for what it cannot write, so that no result is lost to a letter."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError):  # closed
                stream.reconfigure(errors="replace")
