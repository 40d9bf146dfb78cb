"""One part of all clients of a source: a row of bytes for each client seen, in memory or in memory-mapped files.

A cohort's rows are read and written in one go. Rows that a checkpoint refers to are never overwritten while that
checkpoint may still be needed (the newest two), so a run that dies at any moment finds its clients exactly as the
checkpoint knew them. The checkpoint has a checksum of every row on disk.

Of several processes each writes to a file of its own, and reads from those of others what they wrote of its clients. So
a run can go on with another number of processes: a client's row stays where it is until the client has trained again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mixfed.core.tree import Params
from mixfed.data._disk import reserve
from mixfed.errors import InputError

Numbers = NDArray[np.int64]
_ALIGNED = 16

FILE = 1 << 40
"""A place is file·FILE + row."""

HELD = "held"
"""Places that a checkpoint refers to, where they are other ones than those of the clients that are here."""


class ClientRows:
    """The rows of one part, and the place of each client's row (−1: none).

    A place is the number of a row, and the number of the file that it is in. On disk this process writes to the file of
    the number ``writer``.
    """

    def __init__(self, leaves: Params, file: Path | None, writer: int = 0) -> None:
        self.layout = {n: (str(x.dtype).removeprefix("torch."), list(x.shape[1:])) for n, x in leaves.items()}
        self.device = next((x.device for x in leaves.values()), torch.device("cpu"))
        self.file, self.writer = file, 0 if file is None else writer
        self.place_of: Numbers = np.zeros(0, np.int64)
        self.sum_of: Numbers = np.zeros(0, np.int64)
        self.held: list[Numbers] = []
        self.fresh: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.others: dict[int, NDArray[np.uint8]] = {}
        self.rows = self._room(0)

    @classmethod
    def restored(cls, saved: Mapping[str, Any], file: Path | None, writer: int) -> ClientRows:
        layout = {n: (dtype, list(shape)) for n, (dtype, shape) in saved["layout"].items()}
        start = {n: torch.empty((0, *shape), dtype=getattr(torch, d)) for n, (d, shape) in layout.items()}
        table = cls(start, None if "leaves" in saved else file, writer)
        table.device = saved["clients"].device
        clients = saved["clients"].cpu().numpy()
        if "leaves" in saved:
            table.put(clients, saved["leaves"])
            return table
        places, sums = saved["rows"].cpu().numpy(), saved["sums"].cpu().numpy()
        last = saved.get(HELD, saved["rows"])
        table.held = [some.cpu().numpy() for some in (saved.get("before"), last) if some is not None]
        table._open(places)
        if not np.array_equal(table._sums_of(places), sums):
            raise InputError(
                f"The private parts in {file} are not as the run left them; put that file back, or start a new run."
            )
        table._make_room_for(clients)
        table.place_of[clients], table.sum_of[clients] = places, sums
        return table

    def _open(self, places: Numbers) -> None:
        """Opens the files of these places, and the own one, as long as checkpoints refer to it."""
        for number in np.unique(places // FILE).tolist() if self.width else ():
            file = self._path(number)
            if file is None or not file.is_file():
                told = f"The private parts of the clients are not where the run left them: {file} is missing"
                raise InputError(f"{told}.")
            if number != self.writer:
                there = file.stat().st_size // self.width
                self.others[number] = np.memmap(file, np.uint8, "r", shape=(there, self.width))
        own = self._path(self.writer)
        there = own.stat().st_size // self.width if own and own.is_file() and self.width else 0
        self._lengthen(max([there, *(int(some.max()) + 1 for held in self.held if (some := self._own(held)).size)]))

    @property
    def width(self) -> int:
        """Bytes in a row; every leaf begins at a multiple of 16."""
        return sum(_padded(_size(dtype, shape)) for dtype, shape in self.layout.values())

    def clients(self) -> Numbers:
        return np.flatnonzero(self.place_of >= 0)

    def has(self, clients: Numbers) -> bool:
        return bool((clients < len(self.place_of)).all() and (self.place_of[clients] >= 0).all())

    def get(self, clients: Numbers, fallback: Params | None) -> Params:
        rows = np.full(len(clients), -1, np.int64)
        inside = clients < len(self.place_of)
        rows[inside] = self.place_of[clients[inside]]
        taken = self._bytes_of(rows)
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
        places = self.place_of[clients]
        written = self._is_fresh(places)
        self.sum_of[clients[written]] = self._sums_of(places[written])
        saved |= {"rows": torch.from_numpy(places), "sums": torch.from_numpy(self.sum_of[clients])}
        if self.held:
            saved["before"] = torch.from_numpy(self.held[-1])
        self.held = [*self.held[-1:], places]
        self.fresh[:] = False
        return saved

    def _rows_to_write(self, clients: Numbers) -> Numbers:
        """Each client's own row if no checkpoint refers to it, else a free one."""
        self._make_room_for(clients)
        places = self.place_of[clients]
        wanting = ~self._is_fresh(places) if self.file is not None else places < 0
        places[wanting] = self.writer * FILE + self._free(int(wanting.sum()))
        self.place_of[clients] = places
        rows: Numbers = places % FILE
        self.fresh[rows] = True
        return rows

    def _is_fresh(self, places: Numbers) -> NDArray[np.bool_]:
        """Whether rows were written since the last checkpoint."""
        mine: NDArray[np.bool_] = (places >= 0) & (places // FILE == self.writer)
        mine[mine] = self.fresh[places[mine] % FILE]
        return mine

    def _free(self, count: int) -> Numbers:
        if not count:
            return np.zeros(0, np.int64)
        used = np.zeros(len(self.rows), np.bool_)
        for places in (self.place_of, *self.held):
            used[self._own(places)] = True
        free = np.flatnonzero(~used)
        if len(free) < count:
            before = len(self.rows)
            self._lengthen(before + max(count - len(free), before // 2, 64))
            free = np.concatenate([free, np.arange(before, len(self.rows))])
        return free[:count]

    def _own(self, places: Numbers) -> Numbers:
        """The rows of those places that are in this process's own file."""
        return np.asarray(places[(places >= 0) & (places // FILE == self.writer)] % FILE)

    def _lengthen(self, length: int) -> None:
        more = self._room(length)
        if self.file is None:
            more[: len(self.rows)] = self.rows
        self.rows = more
        self.fresh = np.concatenate([self.fresh, np.zeros(length - len(self.fresh), np.bool_)])

    def _make_room_for(self, clients: Numbers) -> None:
        if not clients.size or clients.max() < len(self.place_of):
            return
        more = max(int(clients.max()) + 1, 2 * len(self.place_of)) - len(self.place_of)
        self.place_of = np.concatenate([self.place_of, np.full(more, -1, np.int64)])
        self.sum_of = np.concatenate([self.sum_of, np.zeros(more, np.int64)])

    def _bytes_of(self, places: Numbers) -> NDArray[np.uint8]:
        """The rows at these places; zeros where there is none."""
        found = np.zeros((len(places), self.width), np.uint8)
        for number in np.unique(places[places >= 0] // FILE).tolist():
            here = (places >= 0) & (places // FILE == number)
            rows = self.rows if number == self.writer else self.others[number]
            if int((places[here] % FILE).max()) < len(rows):  # else the file was cut
                found[here] = rows[places[here] % FILE]
        return found

    def _sums_of(self, places: Numbers) -> Numbers:
        few = (self._bytes_of(places[i : i + 1])[0] for i in range(len(places)))
        return np.array([zlib.crc32(row) for row in few], np.int64)

    def _path(self, number: int) -> Path | None:
        return self.file if self.file is None or not number else self.file.with_suffix(f".{number}.rows")

    def _room(self, rows: int) -> NDArray[np.uint8]:
        path = self._path(self.writer)
        if path is None or not rows or not self.width:
            return np.zeros((rows, self.width), np.uint8)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as file:
                reserve(file, os.fstat(file.fileno()).st_size, rows * self.width, path.parent)
                return np.memmap(file, np.uint8, "r+", shape=(rows, self.width))
        except OSError as error:
            raise InputError(f"Cannot keep private parts in {path}: {error.strerror}.") from error


def _size(dtype: str, shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
