"""What clients keep on their devices, in simulation: only the clients that have been seen take room.

The private parts of all clients of a source are tables (:mod:`mixfed.core.private_rows`), one for each part: in memory,
or in files that are memory-mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from mixfed.core.algorithm import Private
from mixfed.core.private_rows import ClientRows, Numbers
from mixfed.core.tree import Params, map_leaves

T = TypeVar("T")


class PrivateStore:
    """Private parts by (source, client); a client that was never seen has the initial one.

    With a ``folder`` the rows live there on disk, and a checkpoint holds only where each client's row is; without,
    they are in memory and the checkpoint holds them whole.

    Where several processes simulate the clients together, each has a store with those of its own clients. Evaluations
    ask for the clients that are ``here``, and join ``from_all`` what was found out about them.
    """

    leads: bool = True
    """Whether this process evaluates what needs no private parts."""

    def __init__(self, initial: Callable[[], Private], folder: str | Path | None = None, writer: int = 0) -> None:
        self._initial = initial
        self._writer = writer
        self._folder = None if folder is None else Path(folder)
        self._tables: dict[str, dict[str, ClientRows]] = {}

    def gather(self, source: str, clients: Sequence[int], first: Private | None = None) -> Private:
        """The private parts of several clients, each leaf with a first dimension over them.

        A part that a client does not have yet is taken from ``first`` (what its message brings), else the initial one;
        where neither has it, the part is there if all of these clients have kept it.
        """
        chosen = np.asarray(clients, np.int64)
        fallback = self._initial() | (first or {})
        found = {part: _repeated(leaves, len(chosen)) for part, leaves in fallback.items()}
        for part, table in self._tables.get(source, {}).items():
            if part in fallback or table.has(chosen):
                found[part] = table.get(chosen, fallback.get(part))
        return found

    def get(self, source: str, client: int, first: Private | None = None) -> Private:
        """One client's private part."""
        return {part: {n: x[0] for n, x in p.items()} for part, p in self.gather(source, [client], first).items()}

    def keeps_something(self) -> bool:
        """Whether clients have private parts at all."""
        return bool(self._initial() or self._tables)

    def put_all(self, source: str, clients: Sequence[int], private: Private) -> None:
        """Keeps the private parts of several clients, as :meth:`gather` gives them."""
        for part, leaves in private.items():
            tables = self._tables.setdefault(source, {})
            if part not in tables:
                tables[part] = ClientRows(leaves, self._file(source, part), self._writer)
            tables[part].put(np.asarray(clients, np.int64), leaves)

    def put(self, source: str, client: int, private: Private) -> None:
        """Keeps one client's private part; an empty one takes no room."""
        self.put_all(source, [client], map_leaves(lambda x: x[None], private))

    def seen(self, source: str, part: str | None = None) -> Numbers:
        """The clients that have kept something (or this part), in order."""
        tables = self._tables.get(source, {})
        found = [table.clients() for name, table in tables.items() if part in (None, name)]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def lacking(self, source: str, part: str, clients: Numbers) -> int:
        """How many of the clients have not kept this part yet."""
        return int(np.sum(~np.isin(clients, self.seen(source, part))))

    def here(self, source: str, clients: Numbers) -> Numbers:
        """Those of the clients whose private parts are here."""
        return clients

    def from_all(self, value: T) -> list[T]:
        """What every process found out about the clients that are there, those with the lowest numbers first."""
        return [value]

    def items(self, source: str) -> Iterator[tuple[int, Private]]:
        """Every client here that was seen so far, in order, one at a time."""
        for client in self.here(source, self.seen(source)).tolist():
            one = np.array([client])
            stored = {p: t for p, t in self._tables[source].items() if t.has(one)}
            yield client, {p: _first(t.get(one, None)) for p, t in stored.items()}

    def tree(self) -> dict[str, Any]:
        """The store as a tree, for the checkpoint that is about to be written."""
        return {source: {p: t.tree() for p, t in tables.items()} for source, tables in self._tables.items()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Takes up the private parts of a checkpoint."""
        self._tables = {
            source: {
                part: ClientRows.restored(saved, self._file(source, part), self._writer)
                for part, saved in parts.items()
            }
            for source, parts in tree.items()
        }

    def _file(self, source: str, part: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{source}.{part.replace(':', '-')}.rows"


def _repeated(leaves: Params, count: int) -> Params:
    return {name: x.expand(count, *x.shape) for name, x in leaves.items()}


def _first(leaves: Params) -> Params:
    def one(x: Tensor) -> Tensor:
        return x[0]

    return {name: one(x) for name, x in leaves.items()}
