"""The snippets of the pages that need no files run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["adding-an-algorithm.md", "asynchronous.md"])
def test_snippets_run(page: str) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for snippet in snippets:
        exec(compile(snippet, page, "exec"), names)
    assert names["result"].metrics["accuracy"] > 0.9


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
