"""``exchange_rows``: any algorithm whose clients receive and return only the rows of tables that their data touch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mixfed.batches import Batches
from mixfed.core import Algorithm, Message, Reply, Server, State
from mixfed.errors import InputError
from mixfed.rows import Trees

_TOLD = "rows/messages"


def exchange_rows(algorithm: Algorithm, *, by_touch: bool = False, in_place: bool = False) -> Algorithm:
    """The algorithm with row exchange for the tables that its model declares; the result is that of full tables.

    A client that does not touch row r of a table would, with the full table, have changed it by Dᵣ: what its optimizer
    does to a row whose own gradient is zero, which is nothing but for a transferred gradient or weight decay. Dᵣ is
    the same on every client, so the server adds it for those that did not have the row. With p_i the clients' weights,
    P their sum and Wᵣ the sum of those that touched r,

        Δᵣ = (Σ_{i touches r} pᵢ·Δᵢᵣ + (P − Wᵣ)·Dᵣ) / P.

    With ``by_touch`` a row that anyone touched is averaged over those who did, Σ pᵢ·Δᵢᵣ / Wᵣ: rare rows then move as
    fast as frequent ones, and the result is no longer that of full tables.

    Where a server step leaves untouched rows alone (FedAvg with plain SGD on the server) it runs on the touched rows
    only. With ``in_place`` these are written into the table that the state holds instead of into a copy of it, so that
    a round costs nothing that grows with the table; the state before the round is then lost, and a ``params`` that a
    callback keeps changes under its hands.

    The clients' loss must see a table only through lookups of the declared ids: a regulariser over the whole table
    belongs to the centre.
    """
    tables = algorithm.model.tables
    if not tables:
        raise InputError("Row exchange needs a model with tables: Model(..., tables={parameter: fields of ids}).")
    if algorithm.personal or algorithm.rows:
        raise InputError(f"The algorithm {algorithm.name} keeps models on clients or exchanges rows already.")
    for name, module in algorithm.model.module().named_modules():
        if isinstance(module, nn.Embedding) and f"{name}.weight" in tables and module.padding_idx is not None:
            raise InputError(
                f"The table '{name}.weight' has a padding_idx, and rows that are exchanged are numbered anew on every"
                " client; leave it out, and mark padding with ids of -1 that the model skips."
            )
    if algorithm.arrive is not Algorithm.arrive:
        raise InputError("Rows that clients exchange cannot be compressed; compress or exchange rows, not both.")

    def broadcast(state: State, server: Server) -> dict[str, Message]:
        messages = algorithm.broadcast(state, server)
        server.notes[_TOLD] = messages
        return messages

    def idle(state: State, message: Message, source: str) -> Trees:
        """Dᵣ: what a client does to rows that its data do not touch."""
        steps = algorithm.batching[source].steps
        if not _drifts(algorithm, state, message, source):
            return {}
        if steps is None:
            raise InputError(
                "Row exchange with a transferred gradient or weight decay needs the same number of local steps on"
                " every client; give steps instead of epochs."
            )
        return _idle(algorithm, state, message, source, steps)

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        messages: Mapping[str, Message] = server.notes.get(_TOLD, {})
        drifts = {source: idle(state, message, source) for source, message in messages.items()}
        if algorithm.row_wise and not any(drifts.values()):
            return _on_touched(algorithm, state, replies, server, by_touch, in_place)
        sizes = {t: len(x) for t, x in algorithm.params(state).items() if t in tables}
        whole = [_whole(r, sizes, drifts.get(r.source, {}), by_touch) for r in replies]
        return algorithm.step(state, whole, server)

    return replace(algorithm, broadcast=broadcast, step=step, rows=tables)


def _drifts(algorithm: Algorithm, state: State, message: Message, source: str) -> bool:
    """Whether a row of ones that no example touches would move."""
    tables = algorithm.model.tables
    ones = {
        part: {n: torch.ones_like(x[:1]) if n in tables else x for n, x in leaves.items()}
        for part, leaves in message.payload.items()
    }
    moved = _idle(algorithm, state, replace(message, payload=ones), source, 1)
    return any(bool(x.any()) for leaves in moved.values() for x in leaves.values())


def _idle(algorithm: Algorithm, state: State, message: Message, source: str, steps: int) -> Trees:
    batches = replace(Batches.without_data(steps, algorithm.model.device), source=source)
    with torch.no_grad():
        upload, _ = algorithm.client(message, algorithm.private(algorithm.params(state)), batches)
    tables = algorithm.model.tables
    return {part: {n: x for n, x in leaves.items() if n in tables} for part, leaves in upload.values.items()}


def _whole(reply: Reply, sizes: Mapping[str, int], drift: Trees, by_touch: bool) -> Reply:
    """The reply as if it had come from clients with full tables."""
    values: Trees = {}
    for part, leaves in reply.values.items():
        values[part] = dict(leaves)
        for t in (t for t in leaves if t in reply.rows):
            ids, rows, share = reply.rows[t], leaves[t], reply.touched[t].to(leaves[t].dtype)
            share = share.view(-1, *(1,) * (rows.ndim - 1))
            idle = drift.get(part, {}).get(t)
            if by_touch:
                rows = rows / share
            elif idle is not None:
                rows = rows + idle.index_select(0, ids).to(rows.dtype) * (1 - share)
            if len(ids) < sizes[t]:
                full = rows.new_zeros(sizes[t], *rows.shape[1:]) if idle is None else idle.to(rows.dtype, copy=True)
                rows = full.index_copy_(0, ids, rows)
            values[part][t] = rows
    return replace(reply, values=values, rows={}, touched={})


def _on_touched(
    algorithm: Algorithm, state: State, replies: Sequence[Reply], server: Server, by_touch: bool, in_place: bool
) -> State:
    """The server's step on the rows that some client touched; the others stay as they are."""
    tables = algorithm.model.tables
    some = {t: [r.rows[t] for r in replies if t in r.rows] for t in tables}
    ids = {t: many[0] if len(many) == 1 else torch.unique(torch.cat(many)) for t, many in some.items() if many}
    places = [{t: torch.searchsorted(ids[t], r.rows[t]) for t in r.rows} for r in replies]
    sizes = {t: len(x) for t, x in ids.items()}
    small = [_whole(replace(r, rows=p), sizes, {}, by_touch) for r, p in zip(replies, places, strict=True)]
    before = _at(state, lambda t, x: x.index_select(0, ids[t]) if t in ids else x)
    after = algorithm.step(before, small, server)

    def put_back(whole: Tensor, rows: Tensor, t: str) -> Tensor:
        return whole.index_copy_(0, ids[t], rows) if in_place else whole.index_copy(0, ids[t], rows)

    result: State = _put(state, after, lambda t, whole, rows: put_back(whole, rows, t) if t in ids else rows)
    return result


def _at(tree: Any, function: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """The tree with the function applied to every leaf, given its name."""
    if isinstance(tree, Mapping):
        return {n: _at(x, function, n) for n, x in tree.items()}
    return function(name, tree) if isinstance(tree, Tensor) else tree


def _put(old: Any, new: Any, function: Callable[[str, Tensor, Tensor], Tensor], name: str = "") -> Any:
    """The new tree with the function applied to the tables of both."""
    if isinstance(new, Mapping):
        return {n: _put(old.get(n), x, function, n) for n, x in new.items()}
    return function(name, old, new) if isinstance(new, Tensor) and isinstance(old, Tensor) else new
