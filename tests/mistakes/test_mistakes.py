"""Every mistake gets one sentence, and the page of mistakes shows it."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from . import commands, files, python
from .table import Mistake, answer, page

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
TABLE = ("<!-- python -m tests.mistakes writes the table -->", "<!-- the end of the table -->")
MISTAKES = [*python.MISTAKES, *files.MISTAKES, *commands.MISTAKES]


def rows() -> str:
    with TemporaryDirectory() as folder, chdir(folder):
        return page([(mistake, answer(mistake)) for mistake in MISTAKES])


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_gets_the_sentence_of_the_page(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    *_, row, end = page([(mistake, answer(mistake))]).split("\n")
    assert not end
    assert row in PAGE.read_text().splitlines()


def test_the_page_has_no_other_rows() -> None:
    inside = PAGE.read_text().partition(TABLE[0])[2].partition(TABLE[1])[0]
    assert inside.count("\n| ") == len(MISTAKES) + 1
