"""Where examples live: one contiguous store for all clients, and one for the centre.

A client is a stretch of rows, never a Python object, so a million clients cost a million integers. Everything
is done for all clients at once, and a cohort's batches are one gather from :attr:`FederatedData.arrays`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mixfed.data import _disk
from mixfed.data._arrays import (
    Arrays,
    Fields,
    Prepare,
    Rows,
    as_array,
    as_arrays,
    as_keys,
    cumulative,
    index,
    indices,
    join,
    offsets_of,
    stretches,
    take,
    validate,
    whole_numbers,
)
from mixfed.errors import InputError
from mixfed.rng import generator

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Arrays", "CentralData", "FederatedData", "Prepare", "spread", "validate"]


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Examples of client 0, then of client 1, …: client ``c`` owns rows ``offsets[c]:offsets[c + 1]``.

    ``prepare`` is applied by whoever gathers a batch, so the store stays small (bytes, not floats).
    ``names`` are the clients' original keys, where they had any.
    """

    arrays: Arrays
    offsets: Rows
    prepare: Prepare | None = None
    names: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", as_arrays(self.arrays))
        object.__setattr__(self, "offsets", whole_numbers(self.offsets, "offsets"))
        if self.names is not None:
            object.__setattr__(self, "names", as_keys(self.names, "names"))
        validate(self.arrays, self.offsets, self.names)

    @classmethod
    def from_arrays(cls, arrays: Fields, clients: ArrayLike | Tensor, prepare: Prepare | None = None) -> FederatedData:
        """Group examples by ``clients``, one key (a number or a text) per example.

        Clients come in the order of their keys, and a client's examples in the order they were given.
        """
        fields, keys = as_arrays(arrays), as_keys(clients, "clients")
        examples = validate(fields)
        if keys.shape != (examples,):
            raise InputError(f"clients has shape {keys.shape}; give one key for each of {examples} examples")
        names, owners, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        if (np.diff(owners) < 0).any():
            fields = take(fields, np.argsort(owners, kind="stable"))
        return cls(fields, offsets_of(sizes), prepare, names)

    @classmethod
    def from_groups(cls, arrays: Fields, groups: Sequence[Rows], prepare: Prepare | None = None) -> FederatedData:
        """One client per group of row numbers, as partitioners give them; rows in no group are left out."""
        if not len(groups):
            raise InputError("there are no groups; give one list of rows per client")
        fields = as_arrays(arrays)
        examples = validate(fields)
        sizes = np.fromiter(map(len, groups), np.int64, len(groups))
        rows = indices(np.concatenate(groups), examples, "row")
        repeated = np.flatnonzero(np.bincount(rows) > 1)
        if len(repeated):
            raise InputError(f"row {repeated[0]} is in more than one group; give every example to one client")
        return cls(take(fields, rows), offsets_of(sizes), prepare)

    @classmethod
    def from_datasets(
        cls, datasets: Sequence[Any], prepare: Prepare | None = None, fields: Sequence[str] = ("x", "y")
    ) -> FederatedData:
        """One client per dataset: a mapping of arrays, a tuple of arrays or a map-style torch dataset.

        ``fields`` names the entries of tuples. A torch dataset is read once, example by example.
        """
        parts = [_arrays_of(dataset, fields) for dataset in datasets]
        filled = [part for part in parts if part]
        if not filled:
            raise InputError("no dataset has an example; give one dataset per client, some of them not empty")
        sizes = np.array([validate(part) if part else 0 for part in parts], np.int64)
        return cls(join(filled), offsets_of(sizes), prepare)

    @classmethod
    def open(cls, folder: str | Path, prepare: Prepare | None = None) -> FederatedData:
        """A store written by :meth:`save`, memory-mapped: rows are read from disk when they are used.

        ``prepare`` is code and is not stored, so it is given again here.
        """
        offsets, names = Path(folder) / "offsets.npy", Path(folder) / "names.npy"
        arrays = _disk.read_fields(folder)
        if not offsets.exists():
            raise InputError(f"'{folder}' has no offsets.npy, hence no clients; open it with CentralData.open")
        known = _disk.read(names) if names.exists() else None
        return cls(arrays, np.array(_disk.read(offsets)), prepare, known)

    def save(self, folder: str | Path) -> None:
        """Write one .npy file per field, and the offsets and names beside them."""
        _disk.write(folder, self.arrays, offsets=self.offsets, names=self.names)

    def __len__(self) -> int:
        return self.clients

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    @property
    def examples(self) -> int:
        """The number of examples of all clients together."""
        return int(self.offsets[-1])

    def sizes(self, clients: ArrayLike | None = None) -> NDArray[np.int64]:
        """How many examples the given clients (or all) have."""
        if clients is None:
            return np.diff(self.offsets)
        chosen = indices(clients, self.clients, "client")
        return self.offsets[chosen + 1] - self.offsets[chosen]

    def owners(self) -> NDArray[np.int64]:
        """The client of every row."""
        return np.repeat(np.arange(self.clients), self.sizes())

    def client(self, client: int) -> Arrays:
        """One client's examples, as views."""
        position = index(client, self.clients, "client")
        rows = slice(self.offsets[position], self.offsets[position + 1])
        return {name: array[rows] for name, array in self.arrays.items()}

    def select(self, clients: ArrayLike) -> FederatedData:
        """The given clients (numbers, or a mask) in that order; copies only their rows."""
        chosen = indices(clients, self.clients, "client")
        sizes = self.sizes(chosen)
        arrays = take(self.arrays, stretches(self.offsets[chosen], sizes))
        names = None if self.names is None else np.asarray(self.names[chosen])
        return replace(self, arrays=arrays, offsets=offsets_of(sizes), names=names)

    def hold_out(self, amount: float | int, seed: int) -> tuple[FederatedData, FederatedData]:
        """(rest, held out): whole clients at random, a number of them (int) or a fraction (float)."""
        count = amount
        if isinstance(amount, float | np.floating):
            count = round(amount * self.clients) if 0 < amount < 1 else 0
        if not 0 < count < self.clients:
            told = f"cannot hold out {amount} of {self.clients} clients"
            raise InputError(f"{told}; give a count, or a fraction below 1, that holds out some and leaves some")
        held = np.zeros(self.clients, np.bool_)
        held[generator(seed, "data/hold_out").permutation(self.clients)[:count]] = True
        return self.select(~held), self.select(held)

    def split(self, fractions: Mapping[str, float], seed: int) -> dict[str, FederatedData]:
        """Split each client's examples at random (``{"train": 0.8, "test": 0.2}``); no part loses a client.

        Uneven shares are rounded up or down at random for each client, so that the parts have the asked sizes
        in total, however small the clients. Every client that has examples keeps at least one in "train" (in
        the first part if none has that name); it may have none in the others.
        """
        cumulative(fractions)
        keep = "train" if "train" in fractions else next(iter(fractions))
        ordered = {keep: fractions[keep], **fractions}
        random = generator(seed, "data/split")
        sizes, owners = self.sizes(), self.owners()
        ends = np.floor(sizes * cumulative(ordered)[:, None] + random.random(self.clients)).astype(np.int64)
        ends = np.clip(ends, np.minimum(sizes, 1), sizes)
        shuffled = np.lexsort((random.random(self.examples), owners))
        rank = np.empty(self.examples, np.int64)
        rank[shuffled] = np.arange(self.examples) - self.offsets[owners]
        part = np.zeros(self.examples, np.int64)
        for end in ends[:-1]:
            part += rank >= end[owners]
        return {name: self._rows(np.flatnonzero(part == list(ordered).index(name))) for name in fractions}

    def _rows(self, rows: Rows) -> FederatedData:
        """The same clients with only the given rows, which must ascend."""
        offsets = np.searchsorted(rows, self.offsets)
        return replace(self, arrays=take(self.arrays, rows), offsets=offsets)

    def without_empty(self) -> FederatedData:
        """The clients that have examples; no example is copied."""
        kept = self.sizes() > 0
        names = None if self.names is None else np.asarray(self.names[kept])
        return replace(self, offsets=offsets_of(self.sizes()[kept]), names=names)

    def require_no_empty_clients(self) -> None:
        """Refuse, by name, a client that has nothing to train on."""
        empty = np.flatnonzero(self.sizes() == 0)
        if len(empty):
            name = "" if self.names is None else f" ('{self.names[empty[0]]}')"
            others = "" if len(empty) == 1 else f", nor have {len(empty) - 1} others"
            raise InputError(f"client {empty[0]}{name} has no examples{others}; drop them with .without_empty()")

    def pooled(self) -> CentralData:
        """All examples as if one party held them, without copying."""
        return CentralData(self.arrays, self.prepare)


@dataclass(frozen=True, eq=False)
class CentralData:
    """Examples that the server holds."""

    arrays: Arrays
    prepare: Prepare | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", as_arrays(self.arrays))
        validate(self.arrays)

    @classmethod
    def from_arrays(cls, arrays: Fields, prepare: Prepare | None = None) -> CentralData:
        """Arrays, lists or tensors with one row per example."""
        return cls(as_arrays(arrays), prepare)

    @classmethod
    def open(cls, folder: str | Path, prepare: Prepare | None = None) -> CentralData:
        """A store written by :meth:`save`, memory-mapped; ``prepare`` is code and is not stored."""
        if (Path(folder) / "offsets.npy").exists():
            raise InputError(f"'{folder}' holds clients; use FederatedData.open, and .pooled() to join them")
        return cls(_disk.read_fields(folder), prepare)

    def save(self, folder: str | Path) -> None:
        """Write one .npy file per field."""
        _disk.write(folder, self.arrays)

    def __len__(self) -> int:
        return self.examples

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(next(iter(self.arrays.values())))

    def select(self, rows: ArrayLike) -> CentralData:
        """The given rows (numbers, or a mask), copied."""
        return replace(self, arrays=take(self.arrays, indices(rows, self.examples, "row")))

    def split(self, fractions: Mapping[str, float], seed: int) -> dict[str, CentralData]:
        """Split at random, e.g. ``{"train": 0.8, "test": 0.2}``; no part may come out empty."""
        ends = np.rint(cumulative(fractions) * self.examples).astype(np.int64)
        sizes = np.diff(ends, prepend=0)
        if (sizes == 0).any():
            empty = list(fractions)[int(np.argmin(sizes))]
            raise InputError(f"part '{empty}' of {self.examples} examples would be empty; make it larger")
        shuffled = generator(seed, "data/split").permutation(self.examples)
        return {
            name: self.select(np.sort(shuffled[end - size : end]))
            for name, end, size in zip(fractions, ends, sizes, strict=True)
        }


def spread(central: CentralData, clients: FederatedData, seed: int) -> FederatedData:
    """The oracle's data: the central examples dealt at random onto the clients, in addition to their own.

    A client receives in proportion to its size, rounded up or down at random: what the federation would look
    like if the centre could give its data away. A client's own examples come first.
    """
    if not clients.examples:
        raise InputError("no client has examples, so there is nothing to deal in proportion to; add some first")
    if central.prepare != clients.prepare:
        raise InputError("clients and centre have different prepare functions; give both the same one")
    random = generator(seed, "data/spread")
    dealt = np.floor(clients.offsets / clients.examples * len(central) + random.random()).astype(np.int64)
    dealt[0], dealt[-1] = 0, len(central)
    np.minimum(dealt, len(central), out=dealt)
    own = np.arange(clients.examples) + np.repeat(dealt[:-1], clients.sizes())
    order = np.empty(clients.examples + len(central), np.int64)
    order[own] = np.arange(clients.examples)
    given = np.ones(len(order), np.bool_)
    given[own] = False
    order[given] = clients.examples + random.permutation(len(central))
    try:
        joined = join([clients.arrays, central.arrays])
    except InputError as error:
        raise InputError(f"clients (dataset 0) and centre (dataset 1) do not match: {error}") from error
    return replace(clients, arrays=take(joined, order), offsets=clients.offsets + dealt)


def _arrays_of(dataset: Any, fields: Sequence[str]) -> Arrays | None:
    """One client's dataset as named arrays; None if it has no examples from which to learn its fields."""
    from torch.utils.data import TensorDataset

    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors
    if isinstance(dataset, Mapping):
        return as_arrays(dataset)
    if isinstance(dataset, tuple):
        return as_arrays(_named(dataset, fields))
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        told = f"a {type(dataset).__name__} is no client dataset"
        raise InputError(f"{told}; give a mapping, a tuple (x, y) or a torch dataset that has a length")
    examples = [_named(dataset[row], fields) for row in range(len(dataset))]
    if not examples:
        return None
    if any(example.keys() != examples[0].keys() for example in examples):
        raise InputError("the examples of a dataset differ in their fields; give every example the same ones")
    columns = {name: [as_array(name, example[name]) for example in examples] for name in examples[0]}
    return {name: as_array(name, column) for name, column in columns.items()}


def _named(example: Any, fields: Sequence[str]) -> dict[str, Any]:
    if isinstance(example, Mapping):
        return dict(example)
    entries = example if isinstance(example, tuple | list) else (example,)
    if len(entries) > len(fields):
        told = f"{len(entries)} entries have only {len(fields)} names"
        raise InputError(f"{told}; name them all with fields=[...]")
    return dict(zip(fields, entries, strict=False))
