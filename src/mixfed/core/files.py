"""Files that are there whole or not at all, and that a symbolic link leads nowhere else."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from mixfed.errors import InputError

_PARTIAL = ".partial"


def write_atomically(path: Path, *contents: bytes | memoryview) -> None:
    """The whole file (the contents one after another) or nothing, even if the machine stops in between.

    It is written under a name that nobody else has, flushed to the disk, and renamed. What is no ordinary file (a
    device, a pipe) stays what it is, and is written into.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        _write_into(path, *contents)
        return
    if not path.name:
        raise InputError(f"Cannot write {path}: it is a folder.")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "xb") as file:
            file.writelines(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise InputError(f"Cannot write {path}: {error.strerror}.") from error


def _write_into(path: Path, *contents: bytes | memoryview) -> None:
    try:
        with open(path, "wb") as file:
            file.writelines(contents)
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}.") from error


def append(path: Path, contents: bytes, *, flush: bool = False) -> None:
    """Adds to the end of a file; with ``flush`` it is on the disk afterwards."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "ab") as file:
            file.write(contents)
            file.flush()
            if flush:
                os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}.") from error


def sweep(folder: Path) -> None:
    """Removes what processes that died while they wrote have left in a folder that nobody else writes to."""
    for partial in folder.glob(f".*{_PARTIAL}"):
        partial.unlink(missing_ok=True)


def refuse_links(paths: Iterable[Path]) -> None:
    """A link would have a run write somewhere else."""
    for path in paths:
        if path.is_symlink():
            raise InputError(f"{path} is a symbolic link, and a run writes into its own folder only; remove the link.")
