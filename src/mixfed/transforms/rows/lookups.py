"""Plain SGD on tables that are looked up: a step reads and writes the rows of its own batch.

A lookup F.embedding(ids, T) gives a copy of the rows T[ids], and the loss is differentiated by that copy, so that a
gradient has the size of the batch and not of the table:

    T[id] ← T[id] − η·Σ g over the places where the batch has the id.

A bag of words Σ T[ids] is the same with a gradient for each bag, which all of its ids share (:func:`bag`).

Under vmap a chunk of clients is one problem: their tables [clients, n, d] end to end are one table, in which client
i's row r is row i·n + r, and a step is one gather and one addition for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mixfed.core import tree
from mixfed.core.batches import Batches
from mixfed.core.model import Loss
from mixfed.core.train import LocalTrainer, Trained
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.errors import InputError
from mixfed.models import vmap
from mixfed.models.bags import bag

Trees = dict[str, Params]
Fields = tuple[str, ...]


@dataclass(frozen=True)
class Lookups:
    """How clients train on rows of ``tables``, each with the fields of local ids that index it.

    In a chunk all clients' tables are of one length; ``batches.extra`` says how many rows of each are a client's own.
    """

    tables: Mapping[str, Fields]

    def train(
        self,
        trainer: LocalTrainer,
        params: Params,
        batches: Batches,
        round: int,
        correction: Params | None,
        loss: Loss | None,
        *,
        want_gradient: bool = False,
    ) -> Trained | None:
        """Plain SGD by :func:`train_on_lookups`, whose gradients the parameters tell; other training goes the usual
        way."""
        plain = loss is None and trainer.clip is None and trainer.optimizer.is_plain_sgd
        if not plain or len(trainer.moves(trainer.own_loss, round)) > 1:
            return None
        model, start = trainer.model, tree.cast(params, trainer.model.dtype)
        parts = {
            "tables": {n: start[n] for n in self.tables},
            "weights": {n: start[n] for n in model.trainable if n not in self.tables},
            "buffers": {n: start[n] for n in model.buffers},
            "correction": correction or {},
        }
        end, total = train_on_lookups(trainer.own_loss, parts, batches, trainer.optimizer.rate(round))
        return Trained(end, total / batches.steps, batches.steps)

    def guarded(self, loss: Loss, batches: Batches) -> Loss:
        """The loss, in which a client of a chunk can only look up its own rows."""
        if not batches.vectorised:
            return loss

        def with_guard(params: Params, batch: Batch) -> Tensor:
            with Guard(self.tables, params, batches.extra):
                return loss(params, batch)

        return with_guard

    def padded(self, batches: Batches) -> frozenset[str]:
        """The fields that index tables and have ids below 0, which are padding; not under vmap."""
        indexing = {name for names in self.tables.values() for name in names if name in batches.fields}
        return frozenset(name for name in indexing if bool((batches.fields[name] < 0).any()))


@dataclass(frozen=True)
class _Whose:
    """The batches that are trained on, the tables' fields of ids, and those fields that have padding."""

    batches: Batches
    tables: Mapping[str, Fields]
    padded: frozenset[str]

    @classmethod
    def of(cls, batches: Batches) -> _Whose:
        kernel = batches.kernel
        known = kernel if isinstance(kernel, Lookups) else Lookups({})
        return cls(batches, known.tables, known.padded(batches))


def train_on_lookups(loss: Loss, parts: Trees, batches: Batches, rate: float) -> tuple[Params, Tensor]:
    """Where plain SGD over the batches ends, and the sum of its losses.

    ``parts`` are "tables", other "weights", "buffers", and the "correction" that every step adds to its gradients.
    """
    if not batches.vectorised:
        return _train(loss, parts, batches, rate)

    def on_chunk(given: dict[str, Any]) -> tuple[Params, Tensor]:
        steps_first = {n: tree.map_leaves(lambda x: x.movedim(1, 0), given[n]) for n in several}
        own = replace(batches, key=given["key"], extra=given["extra"], **steps_first)
        return _train(loss, given["parts"], own, rate)

    several = {"fields": batches.fields, "mask": batches.mask, "active": batches.active}
    several = {n: x for n, x in several.items() if x is not None}
    result: tuple[Params, Tensor] = vmap.beneath(
        on_chunk, several | {"key": batches.key, "extra": batches.extra, "parts": parts}
    )
    return result


def _train(loss: Loss, parts: Trees, batches: Batches, rate: float) -> tuple[Params, Tensor]:
    tables, weights, buffers = (tree.clone(parts[part]) for part in ("tables", "weights", "buffers"))
    correction, dtype = parts["correction"], next(iter(tables.values())).dtype
    total: Tensor | float = 0.0
    whose = _Whose.of(batches)
    for batch, active in batches:
        before = tree.clone(buffers) if active is not None else buffers
        step = rate if active is None else active.to(dtype) * rate
        changes, looked_up, values = _descend(loss, weights, tables, buffers, batch, step, whose)
        for n, c in correction.items():
            change = c * (_like(step, c) if isinstance(step, Tensor) else step)
            changes[n] = changes[n] - change if n in changes else -change
        for one in looked_up:
            one.add_change()
        for n, change in changes.items():
            (tables if n in tables else weights)[n].add_(change)
        if active is not None:
            buffers = {n: torch.where(_like(active, b), b, before[n]) for n, b in buffers.items()}
            values = values * active
        total = total + values
    return weights | tables | buffers, torch.as_tensor(total)


def _descend(
    loss: Loss, weights: Params, tables: Params, buffers: Params, batch: Batch, step: float | Tensor, whose: _Whose
) -> tuple[Params, list[_Lookup], Tensor]:
    """The changes −step·∇loss of weights (and of tables, where they are used other than in lookups), the lookups with
    theirs, and the loss of every client. Clients have nothing in common, so that the gradient of a sum is each one's,
    and it is the sum that is scaled, which costs nothing."""
    leaves = {n: x.detach().requires_grad_() for n, x in (weights | tables).items()}
    found: list[_Lookup] = []
    many = whose.batches.vectorised

    def value(leaves: Params, buffers: Params, batch: Batch) -> Tensor:
        with _Watch({id(leaves[n]): n for n in tables}, tables, found, whose):
            return loss(leaves | buffers, batch)

    with torch.enable_grad():
        values = vmap.for_each(value, leaves, buffers, batch) if many else value(leaves, buffers, batch)
        if not values.requires_grad:
            return {}, [], values
        by = [*leaves.values(), *(one.rows for one in found)]
        scale = torch.full_like(values, -step) if isinstance(step, float) else -step
        changes = torch.autograd.grad(values, by, scale, allow_unused=True)
    own = {n: x for n, x in zip(leaves, changes, strict=False) if x is not None}
    for one, x in zip(found, changes[len(leaves) :], strict=True):
        one.change = x
    return own, found, values.detach()


@dataclass
class _Lookup:
    """The rows of a table that were looked up, as a leaf of the graph, or their sums in bags of equal length.

    ``places`` are their numbers in ``flat``, bag after bag; ``known``, if there, is 0 for places that are padding.
    """

    flat: Tensor
    places: Tensor
    rows: Tensor
    known: Tensor | None = None
    change: Tensor | None = None

    def add_change(self) -> None:
        """flat[places] ← flat[places] + change, added up where a place occurs more than once."""
        if self.change is None or not len(self.places):
            return
        change = self.change.reshape(-1, 1, self.flat.shape[1])
        change = change.expand(-1, len(self.places) // len(change), -1).reshape(len(self.places), -1)
        if self.known is not None:
            change = change * self.known.view(-1, 1)
        self.flat.index_add_(0, self.places, change)


class _Watch(TorchFunctionMode):
    """While active, lookups of tables give leaves of the graph, which ``found`` collects.

    ``names`` knows a table by the identity of what stands for it in the loss. What is not a plain lookup goes its usual
    way, and its gradient is that of the whole table.
    """

    def __init__(self, names: dict[int, str], tables: Params, found: list[_Lookup], whose: _Whose) -> None:
        super().__init__()
        self.names, self.tables, self.found = names, tables, found
        self.many, self.own, self.whose = whose.batches.vectorised, whose.batches.extra, whose

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        return self._bag(*args, **kwargs) if func is bag else func(*args, **kwargs)

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        name = self.names.get(id(weight))
        if name is None or padding_idx is not None or max_norm is not None or scale_grad_by_freq:
            return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return self._beneath(self.rows, name, input)

    def _bag(self, ids: Tensor, table: Tensor) -> Tensor:
        name = self.names.get(id(table))
        return bag(ids, table) if name is None else self._beneath(self.bags, name, ids)

    def _beneath(self, function: Callable[[str, Tensor], Tensor], name: str, ids: Tensor) -> Tensor:
        """function(name, ids), where the ids are those of all clients."""
        found = vmap.beneath_at(partial(function, name), ids) if self.many else function(name, ids)
        if found is None:
            raise InputError(_NOT_ITS_OWN)
        return found

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """The rows with these ids; with many clients the first dimension of both says whose they are."""
        field = self._field(name, ids)
        flat, places = self._places(name, ids, checked=field is not None and field not in self.whose.padded)
        return self._leaf(_Lookup(flat, places, flat.index_select(0, places).view(*ids.shape, -1)))

    def bags(self, name: str, ids: Tensor) -> Tensor:
        """The sums of the rows with these ids over their last dimension, without padding."""
        field = self._field(name, ids)
        padded = field in self.whose.padded if field is not None else bool((ids < 0).any())
        flat, places = self._places(name, ids.clamp(min=0) if padded else ids, checked=field is not None)
        weights = (ids >= 0).to(flat.dtype).view(-1, ids.shape[-1]) if padded else None
        summed = F.embedding_bag(places.view(-1, ids.shape[-1]), flat, mode="sum", per_sample_weights=weights)
        return self._leaf(_Lookup(flat, places, summed.view(*ids.shape[:-1], -1), weights))

    def _leaf(self, one: _Lookup) -> Tensor:
        self.found.append(one)
        return one.rows.requires_grad_()

    def _field(self, name: str, ids: Tensor) -> str | None:
        """The field that the ids are of, if it indexes the table, so that they were made to fit (but for padding)."""
        for field in self.whose.tables.get(name, ()):
            given = self.whose.batches.fields.get(field)
            if given is not None and given.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr():
                return field
        return None

    def _places(self, name: str, ids: Tensor, *, checked: bool) -> tuple[Tensor, Tensor]:
        """The clients' tables end to end, and the places of these ids in them."""
        table = self.tables[name]
        size = table.shape[int(self.many)]
        if not checked:
            _check(name, ids, self.own[name] if self.many else size)
        if self.many:
            ids = ids + torch.arange(0, len(ids) * size, size, device=ids.device).view(-1, *(1,) * (ids.ndim - 1))
        return table.view(-1, table.shape[-1]), ids.reshape(-1)


class Guard(TorchFunctionMode):
    """While active, looking up a row that a client does not have is an error.

    Under vmap tables stand end to end, and an id below 0 or beyond a client's rows would find those of another client.
    """

    def __init__(self, tables: Mapping[str, Fields], params: Params, rows: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(params[t]): t for t in tables if t in params}
        self.rows = rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding or func is bag:
            called = ("input", "weight") if func is F.embedding else ("ids", "table")
            ids, table = (args[i] if i < len(args) else kwargs[n] for i, n in enumerate(called))
            name = self.names.get(id(table))
            if name is not None:
                plain, each = vmap.made_of(ids)
                if not each:
                    raise InputError(_NOT_ITS_OWN)
                with vmap.outside():
                    _check(name, plain.clamp(min=0) if func is bag else plain, vmap.made_of(self.rows[name])[0])
        return func(*args, **kwargs)


_NOT_ITS_OWN = "A client that has some rows of a table can only look up ids that its examples name."


def _check(name: str, ids: Tensor, own: Tensor | int) -> None:
    """Refuses ids that a client's table does not have: ``own`` rows, or of many clients as many as each has."""
    if not ids.numel():
        return
    low, high = ids.reshape(1 if isinstance(own, int) else len(ids), -1).aminmax(dim=1)
    outside = (low < 0) | (high >= own)
    if not bool(outside.any()):
        return
    who = int(outside.nonzero()[0])
    size = own if isinstance(own, int) else int(own[who])
    wrong = int(low[who] if low[who] < 0 else high[who])
    raise InputError(
        f"The model looks up row {wrong} of the table '{name}', of which a client has the rows 0 to {size - 1}; ids of"
        " -1 are padding, and not to be looked up."
    )


def _like(x: Tensor, y: Tensor) -> Tensor:
    """One number for each client, in a shape that goes with y."""
    return x.view(*x.shape, *(1,) * (y.ndim - x.ndim))
