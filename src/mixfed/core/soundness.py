"""What may be wrong with examples although a model takes them.

Numbers that are not finite, features that never change, and test examples that are training examples are found before
the first round. The time that this takes grows with the data once, not with the rounds; of very large data a part is
looked at, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.core.batches import gather
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError

Found = dict[str, str]
"""Warnings: a sentence for each kind of finding."""
Rows = NDArray[np.int64]
Data = FederatedData | CentralData

MOST_BYTES = 2 << 30
"""So much of a field is looked at."""
MOST_ROWS = 200_000
"""So many training examples are compared with test examples."""
BLOCK = 1 << 22
FEW = 50
"""Fewer examples may have the same features by chance."""
NUMBERS = 64
"""So many numbers of each field tell examples apart, before those that seem equal are compared as a whole."""

_log = logging.getLogger("mixfed")


def look_over(
    clients: Mapping[str, Data], central: Mapping[str, Data], tests: Mapping[str, Data], unused: list[Data]
) -> Found:
    """Refuses what spoils every run on these examples, and returns what is likely a mistake.

    The keys of the mappings are the words by which sentences call the sets. ``unused`` are examples that the run has
    and does not look at, which tell whether a feature ever changes.
    """
    found: Found = {}
    for whose, data in clients.items():
        found |= _clients_not_finite(data, whose)
    for whose, data in {**central, **tests}.items():
        for field, rows in _not_finite(data):
            raise InputError(
                f"The field '{field}' of {whose} has numbers that are not finite in {_examples(rows)}, the first in"
                f" row {rows[0]}; fill these gaps or leave the examples out."
            )
    found |= _constant([*clients.values(), *central.values(), *tests.values(), *unused])
    for whose, data in tests.items():
        found |= _seen_before(data, whose, [*clients.values(), *central.values()])
    return found


def client_of(data: Data, row: int) -> str:
    """The client that has this row, by its name if it has one; nothing where the examples are not of clients."""
    if not isinstance(data, FederatedData):
        return ""
    client = int(np.searchsorted(data.offsets, row, side="right")) - 1
    return named_client(data, client)


def named_client(data: FederatedData, client: int) -> str:
    """A client as sentences call it."""
    return f"client {client}" if data.names is None else f"client '{data.names[client]}'"


def _clients_not_finite(data: Data, whose: str) -> Found:
    """A few clients with such numbers spoil nothing but their own updates, which are dropped."""
    assert isinstance(data, FederatedData)
    for field, rows in _not_finite(data):
        owners = np.unique(np.searchsorted(data.offsets, rows, side="right") - 1)
        told = f"The field '{field}' of {whose} has numbers that are not finite in {_examples(rows)}"
        first = named_client(data, int(owners[0]))
        if len(owners) == len(data):
            raise InputError(f"{told}, on every client; fill these gaps or leave the examples out.")
        others = f" and {len(owners) - 1} others" if len(owners) > 1 else ""
        return {
            "gaps": f"{told}, on {first}{others}, whose updates will be dropped; fill these gaps or leave the"
            " examples out."
        }
    return {}


def _examples(rows: Rows) -> str:
    return "1 example" if len(rows) == 1 else f"{len(rows):,} examples"


def _not_finite(data: Data) -> Iterator[tuple[str, Rows]]:
    """Fields with the rows whose numbers are not finite, also once they are prepared for a batch."""
    for name, array in data.arrays.items():
        if array.dtype.kind != "f":
            continue
        bad = [rows for rows in (_bad_rows(start, block) for start, block in _blocks(name, array)) if len(rows)]
        if not bad:
            continue
        rows = np.concatenate(bad)
        if data.prepare is None or _stays_bad(data, rows[:16]):
            yield name, rows


def _bad_rows(start: int, block: NDArray[Any]) -> Rows:
    with np.errstate(all="ignore"):
        if np.isfinite(block.sum()):  # which one bad number would spoil
            return np.zeros(0, np.int64)
    return start + np.flatnonzero(~np.isfinite(block.reshape(len(block), -1)).all(axis=1))


def _stays_bad(data: Data, rows: Rows) -> bool:
    batch = gather(data, rows, "cpu")
    return any(x.is_floating_point() and not bool(x.isfinite().all()) for x in batch.values())


def _blocks(name: str, array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """The rows of a field in blocks, each with the number of its first; every so many blocks where there are many."""
    size = max(array[:1].nbytes, 1)
    rows = max(BLOCK // size, 1)
    every = -(-len(array) * size // MOST_BYTES)
    if every > 1:
        _log.info("One of %d parts of the field '%s' is looked at for mistakes, because it is large.", every, name)
    for start in range(0, len(array), rows * every):
        yield start, array[start : start + rows]


def _constant(every: list[Data]) -> Found:
    """Features that never change; single ones are common among the pixels of images, and are not told."""
    for name, array in every[0].arrays.items() if every else ():
        others = [data.arrays[name] for data in every[1:] if name in data.arrays]
        if name == "y" or array.ndim < 2 or len(array) < FEW:
            continue
        columns = _columns_that_stay(name, [array, *(other for other in others if _alike(other, array))])
        width = int(np.prod(array.shape[1:]))
        if len(columns) == width > 0:
            told = f"All examples have the same '{name}'"
        elif array.ndim == 2 and len(columns) * 20 >= width:
            listed = ", ".join(map(str, columns[:5].tolist())) + (", …" if len(columns) > 5 else "")
            told = f"Of the {width} features in '{name}', {len(columns)} never change (see column {listed})"
        else:
            continue
        return {"constant": f"{told}, so nothing can be learnt from them; look how they were made."}
    return {}


def _columns_that_stay(name: str, arrays: list[NDArray[Any]]) -> Rows:
    """Columns with the same number in all rows: those that change in a few rows are not looked at any further."""
    tables = [array.reshape(len(array), -1) for array in arrays]
    first = tables[0][0]
    few = tables[0][np.linspace(0, len(tables[0]) - 1, 256).astype(np.int64)]
    stay = np.flatnonzero((few == first).all(axis=0))
    for _, block in (part for table in tables for part in _blocks(name, table)):
        if not len(stay):
            break
        stay = stay[(block[:, stay] == first[stay]).all(axis=0)]
    return stay


def _seen_before(test: Data, whose: str, training: list[Data]) -> Found:
    """Test examples that are training examples, where there are more than examples that occur twice by nature."""
    names = [name for name in test.arrays if name != "y"]
    rows = _spaced(test.examples, MOST_ROWS // 10)
    twice, equal, compared = 0.0, 0, 0
    for data in training:
        if not names or not all(n in data.arrays and _alike(data.arrays[n], test.arrays[n]) for n in names):
            continue
        theirs = _spaced(data.examples, MOST_ROWS)
        known = dict(zip(_keys(data, names, theirs), theirs.tolist(), strict=True))
        pairs = ((known.get(key), row) for key, row in zip(_keys(test, names, rows), rows.tolist(), strict=True))
        equal += sum(a is not None and _same(data, a, test, b, names) for a, b in pairs)
        twice = max(twice, 1 - len(known) / max(len(theirs), 1))
        compared += len(theirs)
    if equal <= max(0.01, 2 * twice) * len(rows):
        return {}
    return {
        "seen before": f"{equal:,} of {len(rows):,} of {whose} are also among the {compared:,} training examples that"
        " were compared with them, so figures on them say little about new examples; leave them out of one of the two."
    }


def _alike(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape[1:] == b.shape[1:] and a.dtype == b.dtype


def _same(a: Data, row: int, b: Data, other: int, names: list[str]) -> bool:
    return all(np.array_equal(a.arrays[n][row], b.arrays[n][other]) for n in names)


def _spaced(count: int, most: int) -> Rows:
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)


def _keys(data: Data, names: list[str], rows: Rows) -> list[bytes]:
    """The bytes of some numbers of each of these rows, spread over the row: equal rows have equal ones."""
    parts = []
    for name in names:
        flat = data.arrays[name].reshape(data.examples, -1)
        columns = np.linspace(0, max(flat.shape[1] - 1, 0), min(NUMBERS, flat.shape[1])).astype(np.int64)
        parts.append(np.ascontiguousarray(flat[:, columns][rows]).view(np.uint8).reshape(len(rows), -1))
    together = np.ascontiguousarray(np.concatenate(parts, axis=1))
    found: list[bytes] = together.view(f"V{together.shape[1]}").ravel().tolist()
    return found
