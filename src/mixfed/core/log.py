"""Lists that only grow, in a file beside the checkpoints: each checkpoint adds what is new and marks how far it goes.

So a checkpoint costs the same however many rounds are done. A file is only ever added to by the process that began it,
so what an older checkpoint marks stays as it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mixfed.core.files import append, write_atomically

Entries = list[dict[str, Any]]


class Damaged(Exception):
    """A file is not as it was written."""


class Log:
    """One file with the entries of some lists, a line for each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lists: dict[str, Entries] = {}
        self._written: dict[str, int] = {}
        self._length = 0
        self._hash = _hash()

    def goes_on_with(self, lists: Mapping[str, Entries]) -> bool:
        """Whether these are the lists that were written here, perhaps with more at their ends."""
        same = lists.keys() == self._lists.keys() and all(x is self._lists[name] for name, x in lists.items())
        return same and all(len(x) >= self._written[name] for name, x in lists.items())

    def add(self, lists: Mapping[str, Entries]) -> dict[str, Any]:
        """Writes what the lists have had since, and returns the mark with which :func:`read` finds all of it."""
        new = [[name, entry] for name, entries in lists.items() for entry in entries[self._written.get(name, 0) :]]
        lines = "".join(json.dumps(pair) + "\n" for pair in new).encode()
        if not self._lists:
            write_atomically(self.path, lines)
        elif lines:
            append(self.path, lines, flush=True)
        self._lists = dict(lists)
        self._written = {name: len(entries) for name, entries in lists.items()}
        self._length += len(lines)
        self._hash.update(lines)
        return {
            "file": self.path.name,
            "length": self._length,
            "checksum": self._hash.hexdigest(),
            "lists": list(lists),
        }


def read(folder: Path, mark: Mapping[str, Any]) -> dict[str, Entries]:
    """The lists as they were when the mark was made, or :class:`Damaged`."""
    with open(folder / mark["file"], "rb") as file:
        lines = file.read(mark["length"])
    found = _hash()
    found.update(lines)
    if found.hexdigest() != mark["checksum"]:
        raise Damaged
    lists: dict[str, Entries] = {name: [] for name in mark["lists"]}
    for line in lines.splitlines():
        name, entry = json.loads(line)
        lists[name].append(entry)
    return lists


def _hash() -> Any:
    return hashlib.blake2b(digest_size=16)
