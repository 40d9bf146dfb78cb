"""The snippets of docs/data.md run, one after the other, as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mixfed import data

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert names["oracle"].examples == 700
    assert len(names["data"]) == 30
    assert (tmp_path / "holdings.png").exists()


def test_every_source_and_reader_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert all(f"`{name}`" in page for name in data.SOURCES)
    assert all(name in page for name in data.__all__ if "from_" in name)
    assert all(hasattr(data, name) for name in data.__all__)
