"""Messages of the library speak of the library: the keys of recipes are known to experiments and the command only."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

import mixfed
from mixfed.experiments.recipe import Recipe

ROOT = Path(mixfed.__file__).parent
SECTIONS = "|".join(field.name for field in fields(Recipe))
FILES = [
    file
    for room in ("data", "models", "core", "transforms", "algorithms", "backends", "evaluate")
    for file in sorted((ROOT / room).rglob("*.py"))
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_recipe_key_in_an_error(file: Path) -> None:
    raised = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Raise)]
    words = [n.value for r in raised for n in ast.walk(r) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert [text for text in words if re.search(rf"\b({SECTIONS})\.([a-z_]|$)", text.rstrip("."))] == []
