"""A row of the table, and the sentence that the mistake gets."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixfed.cli import app
from mixfed.errors import InputError, RunStopped


@dataclass(frozen=True)
class Mistake:
    """``make`` does what ``what`` says: it raises an error of one sentence, or returns sentences that warn."""

    what: str
    make: Callable[[], list[str]]


def answer(mistake: Mistake) -> tuple[str, str]:
    """How the mistake is met (refused, stopped or warned), and the sentence."""
    try:
        warnings = mistake.make()
    except InputError as error:
        return "refused", _one(str(error))
    except RunStopped as error:
        return "stopped", _one(str(error))
    return "warned", " ".join(map(_one, warnings))


def _one(text: str) -> str:
    assert text, "nothing is said"
    assert "\n" not in text
    text = text.replace(f"{Path.cwd()}/", "")
    for changing in (r"(?<=\(all: )[^)]*(?=\))", r"(?<=cannot be used here: )[^;]*"):  # with versions and machines
        text = re.sub(changing, "…", text)
    return text if text.endswith((".", "?")) else f"{text[0].upper()}{text[1:]}."


def commanded(*arguments: str) -> Callable[[], list[str]]:
    """The command with these arguments, which exits with an error and one sentence."""

    def make() -> list[str]:
        told = io.StringIO()
        with redirect_stderr(told), redirect_stdout(io.StringIO()):
            try:
                app(list(arguments))
            except SystemExit as stop:
                if stop.code == 2:
                    raise InputError(told.getvalue().strip()) from None
        raise AssertionError(f"exit code 2 was expected: {told.getvalue()}")

    return make


def page(rows: list[tuple[Mistake, Any]]) -> str:
    """The table as Markdown."""
    told = [f"| {mistake.what} | {how} | {_cell(sentence)} |" for mistake, (how, sentence) in rows]
    return "\n".join(["| mistake | | what it gets |", "|---|---|---|", *told]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
