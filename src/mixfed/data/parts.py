"""Clients in parts: where no machine holds the examples of all of them, each rank opens those of its own stretch.

All ranks know how many examples every client has (eight bytes for each), so that they draw the same cohorts; the
examples themselves are mapped from disk for the clients of one part only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mixfed.data import _disk
from mixfed.data._arrays import Arrays, Prepare, Rows, indices, validate
from mixfed.data.store import FederatedData
from mixfed.errors import InputError


def cuts_of(offsets: Rows, parts: int) -> NDArray[np.int64]:
    """Where each part's stretch of clients begins, and where the last one ends: all have about as many examples."""
    wanted = offsets[0] + (offsets[-1] - offsets[0]) * np.arange(1, parts) / parts
    cuts = np.searchsorted((offsets[:-1] + offsets[1:]) / 2, wanted)
    return np.concatenate([[0], cuts, [len(offsets) - 1]]).astype(np.int64)


@dataclass(frozen=True, eq=False)
class PartOfClients(FederatedData):
    """All clients by number and size, of which the clients from ``first`` to before ``end`` have their examples here.

    ``offsets`` are relative to the first row that is here, so that the rows of these clients are found as in any store.
    """

    first: int = 0
    end: int = 0

    def __post_init__(self) -> None:
        self.here()  # is checked

    @property
    def examples(self) -> int:
        """The number of examples that are here."""
        return int(self.offsets[self.end] - self.offsets[self.first])

    def here(self) -> FederatedData:
        """The clients of this part alone, numbered from 0."""
        names = None if self.names is None else self.names[self.first : self.end]
        return FederatedData(self.arrays, self.offsets[self.first : self.end + 1], self.prepare, names)

    def client(self, client: int) -> Arrays:
        """The examples of one client of this part, as views."""
        return self.here().client(int(self._own([client])[0]))

    def select(self, clients: ArrayLike) -> FederatedData:
        """Clients of this part in that order; copies only their rows."""
        return self.here().select(self._own(clients))

    def _own(self, clients: ArrayLike) -> Rows:
        chosen = indices(clients, self.clients, "client")
        away = chosen[(chosen < self.first) | (chosen >= self.end)]
        if len(away):
            told = f"the examples of client {away[0]} are in another part; this one has the clients {self.first} to"
            raise InputError(f"{told} {self.end - 1}")
        return chosen - self.first

    def _refuse(self, *arguments: object, **options: object) -> NoReturn:
        raise InputError("one part of the clients cannot be divided or saved; do this to the whole store before")

    hold_out = split = owners = save = without_empty = _refuse


def save_parts(data: FederatedData, folder: str | Path, parts: int) -> None:
    """Writes a store in parts, each into a folder of its own that can be moved to another machine."""
    for number, (first, end) in enumerate(pairwise(cuts_of(data.offsets, parts).tolist())):
        rows = slice(data.offsets[first], data.offsets[end])
        arrays = {name: array[rows] for name, array in data.arrays.items()}
        _disk.write(_folder(folder, number, parts), arrays, offsets=data.offsets, names=data.names)


def open_part(folder: str | Path, number: int, parts: int, prepare: Prepare | None = None) -> PartOfClients:
    """Part ``number`` of ``parts`` of the clients in a store, memory-mapped.

    The store was written by :func:`save_parts`, of which only this part has to be on this machine, or as a whole by
    :meth:`FederatedData.save`.
    """
    if not 0 <= number < parts:
        raise InputError(f"there is no part {number} of {parts}; parts are numbered from 0")
    own = _folder(folder, number, parts)
    if not own.exists() and not (Path(folder) / "fields").exists():
        there = sorted(path.name for path in Path(folder).glob("part-*"))
        raise InputError(f"'{folder}' has no {own.name}" + (f", but {', '.join(there[:4])}" if there else ""))
    base = own if own.exists() else Path(folder)
    arrays, offsets = _disk.read_fields(base), np.array(_disk.read(base / "offsets.npy"))
    names = _disk.read(base / "names.npy") if (base / "names.npy").exists() else None
    first, end = cuts_of(offsets, parts)[number : number + 2].tolist()
    if base != own:
        validate(arrays, offsets)
        arrays = {name: array[offsets[first] : offsets[end]] for name, array in arrays.items()}
    return PartOfClients(arrays, offsets - offsets[first], prepare, names, first, end)


def _folder(folder: str | Path, number: int, parts: int) -> Path:
    return Path(folder) / f"part-{number}-of-{parts}"
