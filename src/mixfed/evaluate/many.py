"""The answers of many models at once: of clients' own models to the same examples, or of each to its client's own.

Examples are gathered once for several models, and these answer in one pass under vmap. What they have of the common
model, such as a body below heads of their own, is computed once where they answer the same examples. A network that
cannot run under vmap, or whose own parts are convolutions, at which vmap is slow, answers model by model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.core import tree
from mixfed.core.batches import gather
from mixfed.core.model import Model
from mixfed.core.predict import answer, answers
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import explained
from mixfed.models import vmap

Owned = tuple[int, Params]
"""A client, and its own model."""

ROWS, NUMBERS = 8192, 4 << 20
"""Models answer together as long as they have no more examples, and no more numbers of their own, between them."""

SMALL = 256
"""Examples up to which operators take longer to begin than to do their work."""

_ONE_BY_ONE: WeakSet[Model] = WeakSet()
"""Models that vmap turned out not to run."""


def same_examples(
    model: Model, common: Params, owned: Iterable[Owned], data: CentralData, batch_size: int = 1024
) -> Iterator[tuple[int, Batch, Tensor | list[Any]]]:
    """The batches of a set in order, each with its number and the answers of some models; then again with those of the
    next models, until all have answered."""
    for group in _groups(common, owned, lambda client: min(batch_size, len(data))):
        for number, start in enumerate(range(0, len(data), batch_size)):
            batch = gather(data, np.arange(start, min(start + batch_size, len(data))), model.device)
            yield number, batch, _answers(model, common, group, batch, [batch] * len(group), apart=False)


def own_examples(
    model: Model, common: Params, owned: Iterable[Owned], data: FederatedData
) -> Iterator[tuple[dict[int, int], Batch, Any]]:
    """The examples of some clients, with what each client's own model answers to its own; then those of the next.

    The clients come with how many of the examples are theirs, one client's after the other's. One with many examples
    comes several times, a batch at a time. All have some.
    """
    sizes = data.sizes()
    for group in _groups(common, owned, lambda client: int(sizes[client])):
        theirs = {client: int(sizes[client]) for client, _ in group}
        if len(group) == 1:
            (client, own), *_ = group
            for batch, outputs in answers(model, own, CentralData(data.client(client), data.prepare)):
                yield {client: len(next(iter(batch.values())))}, batch, outputs
            continue
        clients = np.array(list(theirs))
        padded = gather(data, _padded(data, clients), model.device)
        each = [{n: x[i, :size] for n, x in padded.items()} for i, size in enumerate(theirs.values())]
        found = _answers(model, common, group, padded, each, apart=True)
        if isinstance(found, Tensor):
            real = torch.from_numpy(np.arange(sizes[clients].max()) < sizes[clients, None]).to(model.device)
            yield theirs, {n: x[real] for n, x in padded.items()}, found[real]
            continue
        for (client, size), batch, outputs in zip(theirs.items(), each, found, strict=True):
            yield {client: size}, batch, outputs


def _groups(common: Params, owned: Iterable[Owned], rows: Callable[[int], int]) -> Iterator[list[Owned]]:
    """Models that answer together, as many as there is room for; ``rows`` says how many examples a client's has."""
    group: list[Owned] = []
    most = numbers = 0
    for client, own in owned:
        size = sum(own[n].numel() for n in _own_leaves(common, own))
        most, numbers = max(most, rows(client)), numbers + size
        if group and (most * (len(group) + 1) > ROWS or numbers > NUMBERS):
            yield group
            group, most, numbers = [], rows(client), size
        group.append((client, own))
    if group:
        yield group


def _answers(
    model: Model, common: Params, group: Sequence[Owned], batch: Batch, each: Sequence[Batch], *, apart: bool
) -> Tensor | list[Any]:
    """What every model answers to its own batch; ``batch`` is everyone's, or, if they are ``apart``, all of them padded
    to the same length and stacked. A tensor where they answered together."""
    names = {n for _, own in group for n in _own_leaves(common, own)}
    if len(group) > 1 and names and _suits(model, common, names) and (apart or _pays(batch, common, names)):
        own = tree.cast({n: torch.stack([own[n] for _, own in group]) for n in names}, model.dtype)
        shared = tree.cast({n: x for n, x in common.items() if n not in names}, model.dtype)

        def one(mine: Params, batch: Batch) -> Any:
            return answer(model, shared | mine, batch)

        try:
            found = torch.vmap(one, in_dims=(0, 0 if apart else None))(own, batch)
        except RuntimeError:  # what is wrong with the network itself shows model by model too
            _ONE_BY_ONE.add(model)
        else:
            if isinstance(found, Tensor):
                return found
            _ONE_BY_ONE.add(model)
    with explained("The model cannot answer"):
        return [answer(model, tree.cast(own, model.dtype), one) for (_, own), one in zip(group, each, strict=True)]


def _suits(model: Model, common: Params, names: Iterable[str]) -> bool:
    """Whether models that have these leaves of their own are likely to be faster together."""
    plain = all(n in common and common[n].ndim <= 3 for n in names)
    return plain and not vmap.MISSING and model not in _ONE_BY_ONE


def _pays(batch: Batch, common: Params, names: Iterable[str]) -> bool:
    """Whether one pass for all saves something: the work of a large common part, or many small operators."""
    own = sum(common[n].numel() for n in names)
    return len(next(iter(batch.values()))) <= SMALL or 2 * own <= sum(x.numel() for x in common.values())


def _own_leaves(common: Params, own: Params) -> list[str]:
    return [n for n, x in own.items() if x is not common.get(n)]


def _padded(data: FederatedData, clients: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of these clients [clients, most]; one with fewer repeats its last."""
    sizes = data.sizes(clients)
    return np.asarray(data.offsets[clients, None] + np.minimum(np.arange(sizes.max()), sizes[:, None] - 1))
