"""The snippet of docs/local-global.md runs."""

from __future__ import annotations

import re
from pathlib import Path


def test_snippets_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "local-global.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "docs/local-global.md", "exec"), {})
