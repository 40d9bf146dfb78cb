"""``exchange_rows``: any algorithm whose clients receive and return only the rows of tables that their data touch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private, Reply, Server, State
from mixfed.errors import InputError
from mixfed.transforms.rows.checks import idle
from mixfed.transforms.rows.lookups import Trees
from mixfed.transforms.travel import Travels, what_travels


def exchange_rows(algorithm: Algorithm, *, by_touch: bool = False, in_place: bool = False) -> Algorithm:
    """The algorithm with row exchange for the tables that its model declares; the result is that of full tables.

    A client that does not touch row r of a table would, with the full table, have changed it by Dᵣ: what its optimizer
    does to a row whose own gradient is zero, which is nothing but for a transferred gradient or weight decay. Dᵣ is
    the same on every client that was sent the same message, so the server, which has that message, adds it for those
    that did not have the row. With p_i the clients' weights, P their sum and Wᵣ the sum of those that touched r,

        Δᵣ = (Σ_{i touches r} pᵢ·Δᵢᵣ + (P − Wᵣ)·Dᵣ) / P.

    With ``by_touch`` a row that anyone touched is averaged over those who did, Σ pᵢ·Δᵢᵣ / Wᵣ over all replies of a
    step: rare rows then move as fast as frequent ones, and the result is no longer that of full tables.

    Where a server step leaves untouched rows alone (FedAvg with plain SGD on the server) it runs on the touched rows
    only. With ``in_place`` these are written into the table that the state holds instead of into a copy of it, so that
    a round costs nothing that grows with the table; the state before the round is then lost, a ``params`` that a
    callback keeps changes under its hands, and no client may be late.

    The clients' loss must see a table only through lookups of the declared ids: a regulariser over the whole table
    belongs to the centre.
    """
    tables = algorithm.model.tables
    if not tables:
        raise InputError("Row exchange needs a model with tables: Model(..., tables={parameter: fields of ids}).")
    if algorithm.rows:
        raise InputError(f"The clients of {algorithm.name} exchange rows already.")
    if algorithm.decode is not None:
        raise InputError("Rows that clients exchange cannot be compressed; compress or exchange rows, not both.")
    travels = what_travels(algorithm)
    kept = algorithm.own.first(algorithm.model.initial())  # once: it copies the tables
    _check_tables_travel(algorithm, travels, kept)
    for name, module in algorithm.model.module().named_modules():
        if isinstance(module, nn.Embedding) and f"{name}.weight" in tables and module.padding_idx is not None:
            raise InputError(
                f"The table '{name}.weight' has a padding_idx, and rows that are exchanged are numbered anew on every"
                " client; leave it out, and mark padding with ids of -1 that the model skips."
            )
    if by_touch and algorithm.uploads == "each":
        raise InputError(
            f"The algorithm {algorithm.name} takes every client's upload by itself, so rows cannot be averaged over the"
            " clients that touched them; leave out by_touch."
        )
    if in_place and not algorithm.rows.untouched_stay:
        raise InputError(f"The server's step of {algorithm.name} moves every row; leave out in_place.")
    _check_steps(algorithm, travels, kept)

    def drift(state: State, message: Message, source: str) -> Trees:
        """Dᵣ: what a client that was sent this message does to rows that its data do not touch."""
        steps = algorithm.batching[source].steps
        if steps is None or not _drifts(algorithm, kept, message, source):
            return {}
        return idle(algorithm, message, kept | (message.first or {}), source, steps)

    def step(state: State, replies: Sequence[Reply], server: Server) -> State:
        told = {id(r.message): (r.message, r.source) for r in replies if r.message is not None}
        drifts = {key: drift(state, message, source) for key, (message, source) in told.items()}
        if by_touch:
            replies = _pooled(replies)
        if algorithm.rows.untouched_stay and not any(drifts.values()):
            return _on_touched(algorithm, state, replies, server, in_place)
        if in_place:
            raise InputError("Weight decay on clients moves every row of a table; leave out in_place.")
        sizes = {t: len(x) for t, x in algorithm.params(state).items() if t in tables}
        whole = [_whole(r, sizes, drifts.get(id(r.message), {})) for r in replies]
        return algorithm.step(state, whole, server)

    return replace(algorithm, step=step, rows=replace(algorithm.rows, tables=tables, in_place=in_place))


def _check_tables_travel(algorithm: Algorithm, travels: Travels, kept: Private) -> None:
    """Refuses an algorithm that leaves a table on the clients, whose rows could not be numbered anew."""
    own = {n for leaves in kept.values() for n in leaves}
    for source, messages in travels.messages.items():
        for message in messages:
            for leaves in (message.first or {}).values():
                own |= set(leaves)
            for table in algorithm.model.tables:
                if table in own or not any(table in leaves for leaves in message.payload.values()):
                    raise InputError(
                        f"The clients '{source}' of {algorithm.name} keep the table '{table}' to themselves, so its"
                        " rows cannot be exchanged; let the table be common, or leave out row exchange."
                    )


def _check_steps(algorithm: Algorithm, travels: Travels, kept: Private) -> None:
    """Refuses clients with different numbers of steps where rows that they do not have move at every step."""
    for source, messages in travels.messages.items():
        ones = [replace(m, payload=tree.map_leaves(torch.ones_like, m.payload)) for m in messages]
        if algorithm.batching[source].steps is None and any(_drifts(algorithm, kept, m, source) for m in ones):
            raise InputError(
                f"The clients of {algorithm.name} move rows that they do not touch (by a transferred gradient, weight"
                " decay or a model that is sent up), so row exchange needs the same number of local steps on every"
                " client; give steps instead of epochs."
            )


def _drifts(algorithm: Algorithm, kept: Private, message: Message, source: str) -> bool:
    """Whether a row of ones that no example touches would move."""
    tables = algorithm.model.tables
    ones = {
        part: {n: torch.ones_like(x[:1]) if n in tables else x for n, x in leaves.items()}
        for part, leaves in message.payload.items()
    }
    moved = idle(algorithm, replace(message, payload=ones), kept | (message.first or {}), source, 1)
    return any(bool(x.any()) for leaves in moved.values() for x in leaves.values())


def _whole(reply: Reply, sizes: Mapping[str, int], drift: Trees) -> Reply:
    """The reply as if it had come from clients with full tables."""
    values: Trees = {}
    for part, leaves in reply.values.items():
        values[part] = dict(leaves)
        for t in (t for t in leaves if t in reply.rows):
            ids, rows, share = reply.rows[t], leaves[t], reply.touched[t].to(leaves[t].dtype)
            own = drift.get(part, {}).get(t)
            if own is not None:
                rows = rows + own.index_select(0, ids).to(rows.dtype) * _column(1 - share, rows)
            if len(ids) < sizes[t]:
                full = rows.new_zeros(sizes[t], *rows.shape[1:]) if own is None else own.to(rows.dtype, copy=True)
                rows = full.index_copy_(0, ids, rows)
            values[part][t] = rows
    return replace(reply, values=values, rows={}, touched={})


def _pooled(replies: Sequence[Reply]) -> list[Reply]:
    """The replies with rows whose mean over them is that of the clients that touched each.

    All replies of a source have the rows that any of them has, divided by the share of the weight that touched these.
    """
    pooled = list(replies)
    for source in dict.fromkeys(r.source for r in replies if r.rows):
        mine = [i for i, r in enumerate(replies) if r.source == source]
        total = sum(replies[i].weight for i in mine)
        ids = {t: torch.unique(torch.cat([replies[i].rows[t] for i in mine])) for t in replies[mine[0]].rows}
        share = {t: torch.zeros(len(x), dtype=torch.float64, device=x.device) for t, x in ids.items()}
        places = {i: {t: torch.searchsorted(ids[t], x) for t, x in replies[i].rows.items()} for i in mine}
        for i in mine:
            for t, at in places[i].items():
                share[t].index_add_(0, at, replies[i].touched[t].double() * (replies[i].weight / total))
        for i in mine:
            values: Trees = {part: dict(leaves) for part, leaves in replies[i].values.items()}
            for leaves in values.values():
                for t in (t for t in leaves if t in ids):
                    rows = leaves[t].new_zeros(len(ids[t]), *leaves[t].shape[1:])
                    rows.index_copy_(0, places[i][t], leaves[t])
                    leaves[t] = rows / _column(share[t].to(rows.dtype), rows)
            everyone = {t: torch.ones_like(x) for t, x in share.items()}
            pooled[i] = replace(replies[i], values=values, rows=ids, touched=everyone)
    return pooled


def _column(x: Tensor, rows: Tensor) -> Tensor:
    """One number for each row, in a shape that goes with them."""
    return x.view(-1, *(1,) * (rows.ndim - 1))


def _on_touched(algorithm: Algorithm, state: State, replies: Sequence[Reply], server: Server, in_place: bool) -> State:
    """The server's step on the rows that some client touched; the others stay as they are."""
    tables = algorithm.model.tables
    some = {t: [r.rows[t] for r in replies if t in r.rows] for t in tables}
    ids = {t: many[0] if len(many) == 1 else torch.unique(torch.cat(many)) for t, many in some.items() if many}
    places = [{t: torch.searchsorted(ids[t], r.rows[t]) for t in r.rows} for r in replies]
    sizes = {t: len(x) for t, x in ids.items()}
    small = [_whole(replace(r, rows=p), sizes, {}) for r, p in zip(replies, places, strict=True)]
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
