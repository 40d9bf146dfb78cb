"""Results as files, each written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mixfed.core.files import write_atomically
from mixfed.errors import InputError


def folder_for(out: Path | None, name: str) -> Path:
    """The folder that the user chose, or else the one of this name under runs/."""
    if out is not None:
        return out
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise InputError(f"{name!r} is no name for a folder under runs/; choose another name, or a folder with --out.")
    return Path("runs") / name


def write_json(path: Path, found: Any) -> None:
    """A result as JSON that people can read too."""
    write_text(path, json.dumps(found, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """A text as UTF-8; bytes of a path that this terminal's letters do not tell stay what they are."""
    write_atomically(path, text.encode("utf-8", "surrogateescape"))
