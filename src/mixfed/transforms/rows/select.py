"""Row exchange ("federated select"): of a table that is indexed by ids, a client gets and returns the rows it needs.

A table T [N, d] and a client whose batches hold the ids I = {i₁ < i₂ < … < iₙ}: down go the n rows T[I] of every part
of the message that has the table (parameters, a transferred gradient), the ids in the batches become 0..n−1, and up
come n rows of every part of the upload. Neither a full table per client nor a round's work of size N is ever formed.
Ids of −1 are padding and stay −1.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from mixfed.core.algorithm import Message, Upload
from mixfed.core.batches import Batches, Plan
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.transforms.rows.distinct import distinct
from mixfed.transforms.rows.lookups import Fields, Lookups, Trees

PADDING = -1
ID_BYTES = 4
"""What it costs a client to name one row."""


@dataclass(frozen=True)
class RowRequest:
    """The rows that a client, or each client of a chunk, asks for: the client's half of row exchange.

    ``batches`` have local ids. ``rows`` has the ids to send by table, [clients, n]; a client that needs fewer than n
    has one of them again, which nothing looks up. ``ids`` lists the U rows that are really needed, client after client;
    ``flat`` says where each stands in a table of [clients·n, d], and ``owner`` whose it is.
    """

    batches: Batches
    tables: Mapping[str, Fields]
    rows: dict[str, Tensor]
    ids: dict[str, Tensor]
    flat: dict[str, Tensor]
    owner: dict[str, Tensor]

    @property
    def bytes_of_ids(self) -> int:
        """What it costs to name the rows; tables that are indexed alike are asked for at once."""
        return ID_BYTES * sum(len(self.ids[t]) for t in {names: t for t, names in self.tables.items()}.values())

    def bytes_of_rows(self, payload: Trees) -> int:
        """What the rows weigh that are sent down for these ids."""
        tables = [(t, x) for leaves in payload.values() for t, x in leaves.items() if t in self.tables]
        return sum(len(self.ids[t]) * x[0].numel() * x.element_size() for t, x in tables)

    def with_rows_of(self, payload: Trees) -> RowDelivery:
        """The same with the rows themselves: the server's half."""
        sent = serve(self.tables, payload, self.rows, many=self.batches.vectorised)
        return RowDelivery(**{f.name: getattr(self, f.name) for f in fields(self)}, payload=sent)


@dataclass(frozen=True)
class RowDelivery(RowRequest):
    """What was asked for and came: ``payload`` has the rows ([clients,] n, d) of every part of the message."""

    payload: Trees

    def given(self, message: Message) -> Message:
        """What a single client receives."""
        return with_tables(message, self.payload)

    def apart(self, values: Trees) -> tuple[Trees, Trees]:
        """What came up from a chunk, apart: ordinary leaves, and tables end to end, whose real rows are at ``flat``."""
        tables = {
            part: {t: x.flatten(0, 1) for t, x in leaves.items() if t in self.tables} for part, leaves in values.items()
        }
        return shared(self.tables, values), {part: leaves for part, leaves in tables.items() if leaves}

    def real(self) -> dict[str, Tensor]:
        """By table, which of a chunk's rows [clients, n] a client really needed; the others are padding."""
        marked = {t: torch.zeros(rows.numel(), dtype=torch.bool, device=rows.device) for t, rows in self.rows.items()}
        return {t: mark.index_fill_(0, self.flat[t], True).view(self.rows[t].shape) for t, mark in marked.items()}

    def with_rows(self, upload: Upload, values: Trees, number: int) -> Upload:
        """One client's upload out of a chunk's values, without padding."""
        ids = {t: i[self.owner[t] == number] for t, i in self.ids.items()}
        trimmed = {
            part: {n: x[number, : len(ids[n])] if n in ids else upload.values[part][n] for n, x in leaves.items()}
            for part, leaves in values.items()
        }
        return replace(upload, values=trimmed, rows=ids)

    def trimmed(self, values: Trees) -> Trees:
        """A single client's values with the rows that it needed, and no other."""
        ids = self.ids
        return {
            part: {n: x[: len(ids[n])] if n in ids else x for n, x in leaves.items()} for part, leaves in values.items()
        }

    def bytes_of(self, values: Trees) -> int:
        """What the real rows of a chunk's values weigh."""
        rows = [(t, x) for leaves in values.values() for t, x in leaves.items() if t in self.tables]
        return sum(len(self.ids[t]) * x[0, 0].numel() * x.element_size() for t, x in rows)


def with_tables(message: Message, tables: Trees) -> Message:
    """The message with these tables instead of its own."""
    return replace(message, payload={part: leaves | tables[part] for part, leaves in message.payload.items()})


def slots(tables: Mapping[str, Fields], plan: Plan) -> dict[str, int]:
    """How many rows of each table a client of the plan can touch at most: the ids in its batches."""
    examples = int(np.prod(plan.rows.shape[1:]))
    width = {name: int(np.prod(array.shape[1:])) for name, array in plan.data.arrays.items()}
    return {t: max(examples * sum(width[n] for n in names), 1) for t, names in tables.items()}


def check_fields(tables: Mapping[str, Fields], data: FederatedData, source: str) -> None:
    """Refuses clients whose examples do not have the ids that a table is indexed by."""
    for table, names in tables.items():
        for name in (n for n in names if n not in data.arrays):
            raise InputError(
                f"The table '{table}' is indexed by the field '{name}', and the examples of '{source}' have"
                f" {', '.join(data.arrays)}."
            )


def shared(tables: Container[str], payload: Trees) -> Trees:
    """The part of a payload that all clients receive alike: everything but the tables."""
    return {part: {n: x for n, x in leaves.items() if n not in tables} for part, leaves in payload.items()}


def pick(tables: Mapping[str, Fields], payload: Trees, batches: Batches, clients: Sequence[int]) -> RowDelivery:
    """The rows that the batches of one client (or of a vmapped chunk) touch, and the batches with local ids."""
    sizes = {t: min(len(leaves[t]) for leaves in payload.values() if t in leaves) for t in tables}
    return ask(tables, sizes, batches, clients).with_rows_of(payload)


def ask(tables: Mapping[str, Fields], sizes: Mapping[str, int], batches: Batches, clients: Sequence[int]) -> RowRequest:
    """Which rows of tables of these sizes the batches of one client (or of a vmapped chunk) touch."""
    many = batches.vectorised
    real = _real(batches)
    local_fields = dict(batches.fields)
    found: dict[str, _Found] = {}
    for names in dict.fromkeys(tables.values()):
        users = [t for t in tables if tables[t] == names]
        size, smallest = min((sizes[t], t) for t in users)
        given = [batches.fields[n] if many else batches.fields[n][None] for n in names]
        padded = _check(given, names, size, smallest, batches.source, clients)
        local, numbered = _number(given, real, size, padded=padded or real is not None)
        local_fields |= {n: x if many else x[0] for n, x in zip(names, local, strict=True)}
        found |= dict.fromkeys(users, numbered)
    amounts = {t: found[t].amounts for t in found} if many else {}
    renumbered = replace(batches, fields=local_fields, kernel=Lookups(tables), extra=amounts)
    return RowRequest(
        renumbered,
        tables,
        rows={t: found[t].rows for t in tables},
        ids={t: found[t].ids for t in tables},
        flat={t: found[t].flat for t in tables},
        owner={t: found[t].owner for t in tables},
    )


def serve(tables: Container[str], payload: Trees, rows: Mapping[str, Tensor], *, many: bool) -> Trees:
    """The rows of these ids [clients, n] of every table in a payload; of a single client without that dimension."""
    sent: Trees = {}
    for part, leaves in payload.items():
        sent[part] = {}
        for t, x in leaves.items():
            if t in tables:
                taken = x.index_select(0, rows[t].reshape(-1)).view(*rows[t].shape, *x.shape[1:])
                sent[part][t] = taken if many else taken[0]
    return sent


@dataclass(frozen=True)
class _Found:
    ids: Tensor
    owner: Tensor
    flat: Tensor
    rows: Tensor
    amounts: Tensor


def _number(given: list[Tensor], real: Tensor | None, size: int, *, padded: bool) -> tuple[list[Tensor], _Found]:
    """Local ids for fields [clients, steps, batch, …]: every client's distinct ids in ascending order are 0..n−1.

    All clients are numbered at once, by sorting client·N + id. Where nothing is ``padded``, all ids are real. The order
    in memory is step after step, as the batches have it.
    """
    count, device = len(given[0]), given[0].device
    given, real = [x.transpose(0, 1) for x in given], None if real is None else real.transpose(0, 1)
    usable = [_usable(x, real) if padded else None for x in given]
    begins = torch.arange(0, (count + 1) * size, size, device=device)
    keys = [x + _by_client(begins[:-1], x) for x in given]
    keys = [k if ok is None else torch.where(ok, k, count * size) for k, ok in zip(keys, usable, strict=True)]
    found, place = distinct(torch.cat([k.reshape(-1) for k in keys]))
    if padded and len(found) and int(found[-1]) == count * size:
        found = found[:-1]
    first = torch.searchsorted(found, begins)
    first, amounts = first[:-1], first.diff()
    owner = torch.repeat_interleave(amounts, output_size=len(found))
    width = max(int(amounts.max()), 1)
    shift = torch.arange(0, count * width, width, device=device) - first
    flat = torch.arange(len(found), device=device) + shift.index_select(0, owner)
    ids = found - begins.index_select(0, owner)
    spare = torch.zeros(count, dtype=torch.int64, device=device).index_copy_(0, owner, ids)
    rows = spare.repeat_interleave(width).index_copy_(0, flat, ids)
    local, start = [], 0
    for x, ok in zip(given, usable, strict=True):
        mine = place[start : start + x.numel()].view(x.shape) - _by_client(first, x)
        start += x.numel()
        if ok is not None:
            # A padded id stays padding; an id in a padded example is anything that exists, because its loss is masked.
            mine = torch.where(ok, mine, torch.where(x < 0, PADDING, 0))
        local.append(mine.transpose(0, 1))
    # A client that touches nothing has one row all the same, which padding may look up and mask.
    return local, _Found(ids, owner, flat, rows.view(count, width), amounts.clamp(min=1))


def _by_client(numbers: Tensor, x: Tensor) -> Tensor:
    """One number for each client, in a shape that goes with x [steps, clients, …]."""
    return numbers.view(-1, *(1,) * (x.ndim - 2))


def _usable(x: Tensor, real: Tensor | None) -> Tensor:
    """Which ids of [steps, clients, batch, …] are those of real examples, and no padding."""
    return x >= 0 if real is None else (x >= 0) & real.view(*real.shape, *(1,) * (x.ndim - 3))


def _real(batches: Batches) -> Tensor | None:
    """Which examples of [clients, steps, batch] are real; None: all."""
    if batches.vectorised:
        return batches.mask
    size = next(iter(batches.fields.values())).shape[1]
    if all(c == size for c in batches.counts):
        return None
    counts = torch.tensor(batches.counts, device=batches.key.device)
    return (torch.arange(size, device=counts.device) < counts[:, None])[None]


def _check(given: list[Tensor], names: Fields, size: int, table: str, source: str, clients: Sequence[int]) -> bool:
    """Refuses ids that the table does not have; whether any of them is padding."""
    padded = False
    for x, name in zip(given, names, strict=True):
        if x.is_floating_point():
            raise InputError(f"The field '{name}' indexes the table '{table}', so it must hold whole numbers.")
        if not x.numel():
            continue
        low, high = (int(end) for end in x.aminmax())
        padded = padded or low < 0
        if low >= PADDING and high < size:
            continue
        wrong = (x < PADDING) | (x >= size)
        who = clients[int(wrong.flatten(1).any(dim=1).nonzero()[0])]
        raise InputError(
            f"Client {who} of '{source}' has the id {int(x[wrong][0])} in '{name}', and the table '{table}' has the"
            f" rows 0 to {size - 1} (-1 is padding)."
        )
    return padded
