"""Can a model do with the rows that its examples name? Tried on one client before the first round."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private
from mixfed.core.batches import Batches, Plan
from mixfed.core.private import PrivateStore
from mixfed.errors import InputError, explained
from mixfed.transforms.rows.lookups import Trees
from mixfed.transforms.rows.select import PADDING, RowDelivery, pick
from mixfed.transforms.travel import idle_upload


def idle(algorithm: Algorithm, message: Message, private: Private, source: str, steps: int) -> Trees:
    """What a client does in so many steps to the rows of tables that none of its examples touch."""
    values = idle_upload(algorithm, message, private, source, steps)
    tables = algorithm.model.tables
    return {part: {n: x for n, x in leaves.items() if n in tables} for part, leaves in values.items()}


def check_lookups(algorithm: Algorithm, message: Message, plan: Plan, privates: PrivateStore) -> bool:
    """Refuses a model whose clients need more of a table than the rows that their examples name.

    One client takes a step on one example (one with padding, if there is such a client) twice: with its rows as it is
    sent them, and with its rows in reverse order between two that are not its own. What it sends up must be the same,
    and the two must fare as they do without examples. False: the result is not finite, so that nothing can be told.
    """
    client, batches = _one_example(plan, algorithm)
    picked = pick(algorithm.rows.tables, message.payload, batches, [client])
    private = privates.get(plan.source, client, message.first)
    told = InputError(
        "A client that has some rows of a table can only look up ids that its examples name, and this model's result"
        f" for client {client} of '{plan.source}' depends on other rows or on how rows are numbered: it looks one up by"
        " a constant or a computed id, or by the -1 of padding, or it uses the table as a whole."
    )
    plain: list[Trees] = []
    for given in (picked, _reversed(picked)):
        try:
            with torch.no_grad(), explained(f"Client {client} of '{plan.source}' cannot train"):
                plain.append(algorithm.client(given.given(message), private, given.batches)[0].values)
        except InputError as error:
            raise told if isinstance(error.__cause__, IndexError) else error from error
    if not all(bool(x.isfinite().all()) for x in tree.leaves({"plain": plain[0], "reversed": plain[1]})):
        return False
    untouched = idle(algorithm, _reversed(picked).given(message), private, plan.source, 1)
    for part, leaves in plain[1].items():
        for n, x in leaves.items():
            if n in algorithm.rows.tables:
                ends = torch.tensor([0, len(x) - 1], device=x.device)
                same = _same(x[1:-1].flip(0), plain[0][part][n]) and _same(x[ends], untouched[part][n][ends])
            else:
                same = _same(x, plain[0][part][n])
            if not same:
                raise told
    return True


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two results of the same arithmetic are equal but for round-off."""
    tolerance = torch.finfo(x.dtype).eps ** 0.5 if x.is_floating_point() else 0.0
    return torch.allclose(x, y, rtol=0.0, atol=tolerance * float(y.abs().max()))


def _one_example(plan: Plan, algorithm: Algorithm) -> tuple[int, Batches]:
    """The first client that has an example with padding (or simply the first), and a step on it."""
    names = {n for names in algorithm.rows.tables.values() for n in names}

    def at(i: int, batches: Batches, step: int, place: int) -> tuple[int, Batches]:
        fields = {n: x[step : step + 1, place : place + 1] for n, x in batches.fields.items()}
        return int(plan.clients[i]), replace(batches, fields=fields).first(2)

    for i in range(len(plan)):
        batches = plan.client(i, algorithm.model.device)
        ids = torch.cat([batches.fields[n].reshape(*batches.fields[n].shape[:2], -1) for n in names], -1)
        padded = (ids == PADDING).any(-1).nonzero().tolist()
        if padded:
            return at(i, batches, *padded[0])
    return at(0, plan.client(0, algorithm.model.device), 0, 0)


def _reversed(picked: RowDelivery) -> RowDelivery:
    """The same rows of a single client in reverse order, after and before one that is not the client's."""
    payload = {
        part: {t: torch.cat([x[:1] + 1, x.flip(0), x[:1] + 1]) for t, x in leaves.items()}
        for part, leaves in picked.payload.items()
    }
    fields = dict(picked.batches.fields)
    for t, names in picked.tables.items():
        count = len(next(leaves[t] for leaves in picked.payload.values() if t in leaves))
        fields |= {n: torch.where((x := picked.batches.fields[n]) < 0, x, count - x) for n in names}
    return replace(picked, payload=payload, batches=replace(picked.batches, fields=fields))
