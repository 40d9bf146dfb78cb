"""Results as files, each written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mixfed.core.files import write_atomically


def write_json(path: Path, found: Any) -> None:
    """A result as JSON that people can read too."""
    write_text(path, json.dumps(found, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """A text as UTF-8."""
    write_atomically(path, text.encode())
