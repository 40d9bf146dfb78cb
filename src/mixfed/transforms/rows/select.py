"""Row exchange ("federated select"): of a table that is indexed by ids, a client gets and returns the rows it needs.

A table T [N, d] and a client whose batches hold the ids I = {i₁ < i₂ < … < iₙ}: down go the n rows T[I] of every part
of the message that has the table (parameters, a transferred gradient), the ids in the batches become 0..n−1, and up
come n rows of every part of the upload. Neither a full table per client nor a round's work of size N is ever formed.
Ids of −1 are padding and stay −1.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from mixfed.core.algorithm import Message, Upload
from mixfed.core.batches import Batches, Plan
from mixfed.core.tree import Params
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.transforms.rows.distinct import distinct

Trees = dict[str, Params]
Fields = tuple[str, ...]

PADDING = -1
ID_BYTES = 4
"""What it costs a client to name one row."""


@dataclass(frozen=True)
class Picked:
    """The rows that a client, or each client of a chunk, needs.

    ``batches`` have local ids, ``payload`` the rows ([clients,] n, d) of every part of the message; a client that needs
    fewer than n has one of them again, which nothing looks up. ``ids`` lists the U real rows by table, client after
    client; ``flat`` says where each stands in a table of [clients·n, d], and ``owner`` whose it is.
    """

    batches: Batches
    payload: Trees
    ids: dict[str, Tensor]
    flat: dict[str, Tensor]
    owner: dict[str, Tensor]
    bytes_down: int
    tables: Mapping[str, Fields]

    def given(self, message: Message) -> Message:
        """What a single client receives."""
        return with_tables(message, self.payload)

    def apart(self, values: Trees) -> tuple[Trees, Trees]:
        """What came up from a chunk, apart: ordinary leaves, and of every table the U real rows."""
        tables = {part: {t: x for t, x in leaves.items() if t in self.tables} for part, leaves in values.items()}
        picked = {
            part: {t: x.flatten(0, 1).index_select(0, self.flat[t]) for t, x in leaves.items()}
            for part, leaves in tables.items()
            if leaves
        }
        return shared(self.tables, values), picked

    def with_rows(self, upload: Upload, values: Trees, number: int) -> Upload:
        """One client's upload out of a chunk's values, without padding."""
        ids = {t: i[self.owner[t] == number] for t, i in self.ids.items()}
        trimmed = {
            part: {n: x[number, : len(ids[n])] if n in ids else upload.values[part][n] for n, x in leaves.items()}
            for part, leaves in values.items()
        }
        return replace(upload, values=trimmed, rows=ids)

    @property
    def bytes_of_ids(self) -> int:
        """What it costs to name the rows; tables that are indexed alike are asked for at once."""
        return ID_BYTES * sum(len(self.ids[t]) for t in {names: t for t, names in self.tables.items()}.values())

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


def pick(tables: Mapping[str, Fields], payload: Trees, batches: Batches, clients: Sequence[int]) -> Picked:
    """The rows that the batches of one client (or of a vmapped chunk) touch, and the batches with local ids."""
    many = batches.vectorised
    real = _real(batches)
    fields = dict(batches.fields)
    ids, flat, owner = {}, {}, {}
    rows: dict[str, Tensor] = {}
    amounts: dict[str, Tensor] = {}
    for names in dict.fromkeys(tables.values()):
        users = [t for t in tables if tables[t] == names]
        size, smallest = min((len(leaves[t]), t) for leaves in payload.values() for t in users if t in leaves)
        given = [batches.fields[n] if many else batches.fields[n][None] for n in names]
        _check(given, names, size, smallest, batches.source, clients)
        local, found = _number(given, real, size)
        fields |= {n: x if many else x[0] for n, x in zip(names, local, strict=True)}
        for t in users:
            ids[t], owner[t], flat[t], rows[t] = found.ids, found.owner, found.flat, found.rows
            amounts[t] = found.amounts
    sent: Trees = {}
    down = 0
    for part, leaves in payload.items():
        sent[part] = {}
        for t in tables:
            if t not in leaves:
                continue
            x = leaves[t]
            width = rows[t].shape[1]
            taken = x.index_select(0, rows[t].view(-1)).view(len(clients), width, *x.shape[1:])
            sent[part][t] = taken if many else taken[0]
            down += len(ids[t]) * x[0].numel() * x.element_size()
    renumbered = replace(batches, fields=fields, tables=tables, rows=amounts if many else {})
    return Picked(renumbered, sent, ids, flat, owner, down, tables)


@dataclass(frozen=True)
class _Found:
    ids: Tensor
    owner: Tensor
    flat: Tensor
    rows: Tensor
    amounts: Tensor


def _number(given: list[Tensor], real: Tensor | None, size: int) -> tuple[list[Tensor], _Found]:
    """Local ids for fields [clients, steps, batch, …]: every client's distinct ids in ascending order are 0..n−1.

    All clients are numbered at once, by sorting client·N + id.
    """
    count = len(given[0])
    usable = [x >= 0 if real is None else (x >= 0) & real.view(*real.shape, *(1,) * (x.ndim - 3)) for x in given]
    client = torch.arange(count, device=given[0].device)
    keys = [
        torch.where(ok, x + client.view(-1, *(1,) * (x.ndim - 1)) * size, count * size)
        for x, ok in zip(given, usable, strict=True)
    ]
    found, place = distinct(torch.cat([k.reshape(-1) for k in keys]))
    found = found[found < count * size]
    owner = torch.div(found, size, rounding_mode="floor")
    amounts = torch.bincount(owner, minlength=count)
    first = amounts.cumsum(0) - amounts
    width = max(int(amounts.max()), 1)
    position = torch.arange(len(found), device=found.device) - first[owner]
    flat = owner * width + position
    ids = found - owner * size
    spare = torch.zeros(count, dtype=torch.int64, device=ids.device)
    spare[owner] = ids
    rows = spare.repeat_interleave(width)
    rows[flat] = ids
    local, start = [], 0
    for x, ok in zip(given, usable, strict=True):
        mine = place[start : start + x.numel()].view(x.shape) - first.view(-1, *(1,) * (x.ndim - 1))
        start += x.numel()
        # A padded id stays padding; an id in a padded example is anything that exists, because its loss is masked.
        local.append(torch.where(ok, mine, torch.where(x < 0, PADDING, 0)))
    # A client that touches nothing has one row all the same, which padding may look up and mask.
    return local, _Found(ids, owner, flat, rows.view(count, width), amounts.clamp(min=1))


def _real(batches: Batches) -> Tensor | None:
    """Which examples of [clients, steps, batch] are real; None: all."""
    if batches.vectorised:
        return batches.mask
    size = next(iter(batches.fields.values())).shape[1]
    if all(c == size for c in batches.counts):
        return None
    counts = torch.tensor(batches.counts, device=batches.key.device)
    return (torch.arange(size, device=counts.device) < counts[:, None])[None]


def _check(given: list[Tensor], names: Fields, size: int, table: str, source: str, clients: Sequence[int]) -> None:
    for x, name in zip(given, names, strict=True):
        if x.is_floating_point():
            raise InputError(f"The field '{name}' indexes the table '{table}', so it must hold whole numbers.")
        if not x.numel():
            continue
        low, high = int(x.min()), int(x.max())
        if low >= PADDING and high < size:
            continue
        wrong = (x < PADDING) | (x >= size)
        who = clients[int(wrong.flatten(1).any(dim=1).nonzero()[0])]
        raise InputError(
            f"Client {who} of '{source}' has the id {int(x[wrong][0])} in '{name}', and the table '{table}' has the"
            f" rows 0 to {size - 1} (-1 is padding)."
        )


@dataclass
class RowSum:
    """Σᵢ wᵢ·rowsᵢ over clients, kept by the rows that were touched, and Σ wᵢ of the clients that touched each."""

    _pending: dict[str, list[tuple[Tensor, Tensor, Trees]]] = field(default_factory=dict)

    def add(self, ids: Mapping[str, Tensor], weights: Mapping[str, Tensor], values: Trees) -> None:
        """Adds rows that already are multiplied by their clients' weights."""
        for t in ids:
            mine = {part: {t: leaves[t]} for part, leaves in values.items() if t in leaves}
            pending = self._pending.setdefault(t, [])
            pending.append((ids[t], weights[t].double(), mine))
            if len(pending) > 2 and sum(len(p[0]) for p in pending[1:]) > max(4 * len(pending[0][0]), _MANY):
                self._pending[t] = [_compact(pending)]

    def merge(self, other: RowSum) -> None:
        """Adds what another worker has gathered."""
        for t, pending in other._pending.items():
            self._pending.setdefault(t, []).extend(pending)

    def result(self) -> tuple[dict[str, Tensor], dict[str, Tensor], Trees]:
        """By table: the ids that were touched (ascending), the weights of their clients, and the sums."""
        ids: dict[str, Tensor] = {}
        weights: dict[str, Tensor] = {}
        values: Trees = {}
        for t, pending in self._pending.items():
            ids[t], weights[t], sums = _compact(pending)
            for part, leaves in sums.items():
                values.setdefault(part, {}).update(leaves)
        return ids, weights, values


_MANY = 1 << 19


def _compact(pending: list[tuple[Tensor, Tensor, Trees]]) -> tuple[Tensor, Tensor, Trees]:
    """The same sum with every row once."""
    ids, place = distinct(torch.cat([p[0] for p in pending]))
    places = torch.split(place, [len(p[0]) for p in pending])
    weight = ids.new_zeros(len(ids), dtype=pending[0][1].dtype)
    sums = {
        part: {t: x.new_zeros(len(ids), *x.shape[1:]) for t, x in leaves.items()}
        for part, leaves in pending[0][2].items()
    }
    for at, (_, w, values) in zip(places, pending, strict=True):
        weight.index_add_(0, at, w)
        for part, leaves in values.items():
            for t, x in leaves.items():
                flat = x.reshape(len(x), -1)  # scatter_add_ is several times as fast as index_add_ here
                sums[part][t].view(len(ids), -1).scatter_add_(0, at[:, None].expand_as(flat), flat)
    return ids, weight, sums
