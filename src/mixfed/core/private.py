"""What clients keep on their devices, in simulation: only the clients that have been seen take room.

The private parts of all clients of a source are tables, one for each part: a row of bytes for each client seen, in
memory or in a file that is memory-mapped. A cohort's rows are read and written in one go. Rows that a checkpoint
refers to are never overwritten while that checkpoint may still be needed (the newest two), so a run that dies at any
moment finds its clients exactly as the checkpoint knew them. The checkpoint has a checksum of every row on disk.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.core.algorithm import Private
from mixfed.core.storage import reserve
from mixfed.core.tree import Params, map_leaves
from mixfed.errors import InputError

T = TypeVar("T")

Numbers = NDArray[np.int64]
_ALIGNED = 16


class PrivateStore:
    """Private parts by (source, client); a client that was never seen has the initial one.

    With a ``folder`` the rows live there on disk, and a checkpoint holds only where each client's row is; without,
    they are in memory and the checkpoint holds them whole.

    Where several processes simulate the clients together, each has a store with those of its own clients. Evaluations
    ask for the clients that are ``here``, and join ``from_all`` what was found out about them.
    """

    leads: bool = True
    """Whether this process evaluates what needs no private parts."""

    def __init__(self, initial: Callable[[], Private], folder: str | Path | None = None) -> None:
        self._initial = initial
        self._folder = None if folder is None else Path(folder)
        self._tables: dict[str, dict[str, _Table]] = {}

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
                tables[part] = _Table(leaves, self._file(source, part))
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
            source: {part: _Table.restored(saved, self._file(source, part)) for part, saved in parts.items()}
            for source, parts in tree.items()
        }

    def _file(self, source: str, part: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{source}.{part.replace(':', '-')}.rows"


class _Table:
    """One part of all clients of a source: rows of bytes, and which row is whose (−1: none)."""

    def __init__(self, leaves: Params, file: Path | None) -> None:
        self.layout = {n: (str(x.dtype).removeprefix("torch."), list(x.shape[1:])) for n, x in leaves.items()}
        self.device = next((x.device for x in leaves.values()), torch.device("cpu"))
        self.file = file
        self.row_of: Numbers = np.zeros(0, np.int64)
        self.held: list[Numbers] = []
        self.fresh: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.sums: Numbers = np.zeros(0, np.int64)
        self.rows = self._room(0)

    @classmethod
    def restored(cls, saved: Mapping[str, Any], file: Path | None) -> _Table:
        layout = {n: (dtype, list(shape)) for n, (dtype, shape) in saved["layout"].items()}
        table = cls({n: torch.empty((0, *shape), dtype=getattr(torch, d)) for n, (d, shape) in layout.items()}, None)
        table.device = saved["clients"].device
        clients = saved["clients"].cpu().numpy()
        if "leaves" in saved:
            table.put(clients, saved["leaves"])
            return table
        if file is None or (table.width and not file.is_file()):
            raise InputError(f"The private parts of the clients are not where the run left them: {file} is missing.")
        table.file = file
        table.held = [saved[name].cpu().numpy() for name in ("before", "rows") if name in saved]
        rows, sums = table.held[-1], saved["sums"].cpu().numpy()
        there = file.stat().st_size // table.width if table.width else 0
        table._lengthen(max([there, *(int(some.max()) + 1 for some in table.held if some.size)]))
        if not np.array_equal(table._sums_of(rows), sums):
            raise InputError(
                f"The private parts in {file} are not as the run left them; put that file back, or start a new run."
            )
        table._own(clients, rows)
        table.sums[rows] = sums
        return table

    @property
    def width(self) -> int:
        """Bytes in a row; every leaf begins at a multiple of 16."""
        return sum(_padded(_size(dtype, shape)) for dtype, shape in self.layout.values())

    def clients(self) -> Numbers:
        return np.flatnonzero(self.row_of >= 0)

    def has(self, clients: Numbers) -> bool:
        return bool((clients < len(self.row_of)).all() and (self.row_of[clients] >= 0).all())

    def get(self, clients: Numbers, fallback: Params | None) -> Params:
        rows = np.full(len(clients), -1, np.int64)
        inside = clients < len(self.row_of)
        rows[inside] = self.row_of[clients[inside]]
        taken = self.rows[np.maximum(rows, 0)] if len(self.rows) else np.zeros((len(clients), self.width), np.uint8)
        found: Params = {}
        missing = torch.from_numpy(np.flatnonzero(rows < 0))
        start = 0
        for name, (dtype, shape) in self.layout.items():
            size = _size(dtype, shape)
            cut = torch.from_numpy(np.ascontiguousarray(taken[:, start : start + size]))
            leaf = cut.view(getattr(torch, dtype)).reshape(len(clients), *shape).to(self.device)
            if len(missing):
                if fallback is None:
                    raise KeyError(name)
                leaf[missing] = fallback[name].to(leaf.dtype)
            found[name] = leaf
            start += _padded(size)
        return found

    def put(self, clients: Numbers, leaves: Params) -> None:
        rows = self._rows_to_write(clients)
        start = 0
        for name, (dtype, shape) in self.layout.items():
            size = _size(dtype, shape)
            x = leaves[name].detach().to("cpu", getattr(torch, dtype)).contiguous().reshape(len(clients), -1)
            self.rows[rows, start : start + size] = x.view(torch.uint8).numpy() if size else 0
            start += _padded(size)

    def tree(self) -> dict[str, Any]:
        clients = self.clients()
        saved: dict[str, Any] = {"layout": self.layout, "clients": torch.from_numpy(clients)}
        if self.file is None:
            return saved | {"leaves": self.get(clients, None)}
        if isinstance(self.rows, np.memmap):
            self.rows.flush()
        rows = self.row_of[clients]
        written = rows[self.fresh[rows]]
        self.sums[written] = self._sums_of(written)
        saved |= {"rows": torch.from_numpy(rows), "sums": torch.from_numpy(self.sums[rows])}
        if self.held:
            saved["before"] = torch.from_numpy(self.held[-1])
        self.held = [*self.held[-1:], rows]
        self.fresh[:] = False
        return saved

    def _rows_to_write(self, clients: Numbers) -> Numbers:
        """Each client's own row if no checkpoint refers to it, else a free one."""
        if clients.size and clients.max() >= len(self.row_of):
            longer = np.full(max(int(clients.max()) + 1, 2 * len(self.row_of)), -1, np.int64)
            longer[: len(self.row_of)] = self.row_of
            self.row_of = longer
        rows = self.row_of[clients]
        wanting = rows < 0
        if self.file is not None:
            wanting |= ~self.fresh[np.maximum(rows, 0)] if len(self.fresh) else True
        rows[wanting] = self._free(int(wanting.sum()))
        self._own(clients, rows)
        self.fresh[rows] = True
        return rows

    def _free(self, count: int) -> Numbers:
        if not count:
            return np.zeros(0, np.int64)
        used = np.zeros(len(self.rows), np.bool_)
        for rows in (self.row_of[self.row_of >= 0], *self.held):
            used[rows] = True
        free = np.flatnonzero(~used)
        if len(free) < count:
            before = len(self.rows)
            self._lengthen(before + max(count - len(free), before // 2, 64))
            free = np.concatenate([free, np.arange(before, len(self.rows))])
        return free[:count]

    def _lengthen(self, length: int) -> None:
        more = self._room(length)
        if self.file is None:
            more[: len(self.rows)] = self.rows
        self.rows = more
        self.fresh = np.concatenate([self.fresh, np.zeros(length - len(self.fresh), np.bool_)])
        self.sums = np.concatenate([self.sums, np.zeros(length - len(self.sums), np.int64)])

    def _sums_of(self, rows: Numbers) -> Numbers:
        return np.array([zlib.crc32(self.rows[row]) for row in rows], np.int64)

    def _own(self, clients: Numbers, rows: Numbers) -> None:
        if clients.size and clients.max() >= len(self.row_of):
            self.row_of = np.full(int(clients.max()) + 1, -1, np.int64)
        self.row_of[clients] = rows

    def _room(self, rows: int) -> NDArray[np.uint8]:
        if self.file is None or not rows or not self.width:
            return np.zeros((rows, self.width), np.uint8)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as file:
                reserve(file, rows * self.width, self.file.parent)
                return np.memmap(file, np.uint8, "r+", shape=(rows, self.width))
        except OSError as error:
            raise InputError(f"Cannot keep private parts in {self.file}: {error.strerror}.") from error


def _size(dtype: str, shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _repeated(leaves: Params, count: int) -> Params:
    return {name: x.expand(count, *x.shape) for name, x in leaves.items()}


def _first(leaves: Params) -> Params:
    def one(x: Tensor) -> Tensor:
        return x[0]

    return {name: one(x) for name, x in leaves.items()}
