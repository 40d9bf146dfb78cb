"""Private parts on ranks: each rank keeps those of its own clients, and all know which clients have kept something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.backends.distributed.ranks import Ranks
from mixfed.backends.distributed.shares import Numbers, home_of
from mixfed.core.algorithm import Private
from mixfed.core.private import PrivateStore, T
from mixfed.core.private_rows import FILE, HELD


class RankPrivates(PrivateStore):
    """The private parts of the clients that belong to this rank. ``cuts`` are the ranks' stretches by source."""

    def __init__(
        self, initial: Callable[[], Private], folder: str | Path | None, ranks: Ranks, cuts: Mapping[str, Numbers]
    ) -> None:
        super().__init__(initial, folder, writer=ranks.rank)
        self._ranks, self._cuts, self.leads = ranks, cuts, ranks.leads
        self._elsewhere: dict[str, dict[str, NDArray[np.bool_]]] = {}

    def here(self, source: str, clients: Numbers) -> Numbers:
        """Those of the clients whose private parts are here."""
        found: Numbers = clients[self._is_here(source, clients)]
        return found

    def from_all(self, value: T) -> list[T]:
        """What every rank found out about its own clients; the clients of rank 0 come first."""
        return self._ranks.gather(value)

    def note(self, source: str, clients: Sequence[int], parts: Iterable[str]) -> None:
        """Hears that these clients have kept these parts, here or elsewhere."""
        chosen = np.asarray(clients, np.int64)
        others = chosen[~self._is_here(source, chosen)]
        for part in parts if len(others) else ():
            known = self._elsewhere.setdefault(source, {})
            known.setdefault(part, np.zeros(self._cuts[source][-1], np.bool_))[others] = True

    def keeps_something(self) -> bool:
        """Whether clients have private parts at all."""
        return super().keeps_something() or bool(self._elsewhere)

    def seen(self, source: str, part: str | None = None) -> Numbers:
        """The clients of all ranks that have kept something (or this part), in order."""
        found = np.zeros(self._cuts[source][-1], np.bool_)
        found[super().seen(source, part)] = True
        for name, others in self._elsewhere.get(source, {}).items():
            if part in (None, name):
                found |= others
        return np.flatnonzero(found)

    def tree(self) -> dict[str, Any]:
        """The parts of all clients, on rank 0, which writes the checkpoint; in the form that one process has."""
        found = self._ranks.to_first(super().tree())
        sources = {source: None for tree in found for source in tree}
        return {source: _joined([tree[source] for tree in found if source in tree]) for source in sources}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Takes up what a checkpoint has of this rank's own clients, whatever ranks there were before."""
        mine: dict[str, Any] = {}
        for source, parts in tree.items():
            mine[source] = {}
            for part, saved in parts.items():
                clients = saved["clients"].cpu().numpy()
                mine[source][part] = _some(saved, self._is_here(source, clients))
                for name, places in (("before", saved.get("before")), (HELD, saved.get("rows"))):
                    if places is not None:
                        mine[source][part][name] = places[self._is_kept_here(places // FILE)]
                self.note(source, clients, [part])
        super().restore(mine)

    def _is_kept_here(self, file: Tensor) -> Tensor:
        """Whether this rank sees to it that rows in this file are not overwritten: in its own, or in nobody's."""
        return (file == self._ranks.rank) | (self.leads & (file >= self._ranks.size))

    def _is_here(self, source: str, clients: Numbers) -> NDArray[np.bool_]:
        return np.asarray(home_of(clients, self._cuts[source]) == self._ranks.rank)


_BY_CLIENT = ("clients", "rows", "sums", "leaves")
"""What a table's tree has for each client."""


def _joined(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """The tables of several ranks as one; clients come in the order of ranks, which is their own."""
    parts = {part: None for tree in trees for part in tree}
    return {part: _concatenated([tree[part] for tree in trees if part in tree]) for part in parts}


def _concatenated(tables: list[dict[str, Any]]) -> dict[str, Any]:
    if len(tables) == 1:
        return tables[0]
    found: dict[str, Any] = {"layout": tables[0]["layout"]}
    for name in (*_BY_CLIENT, "before"):
        values = [table[name] for table in tables if name in table]
        if values and isinstance(values[0], Mapping):
            found[name] = {leaf: torch.cat([value[leaf] for value in values]) for leaf in values[0]}
        elif values:
            found[name] = torch.cat(values)
    return found


def _some(table: Mapping[str, Any], chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """The table of some of its clients."""
    rows = torch.from_numpy(np.flatnonzero(chosen)).to(table["clients"].device)
    found = dict(table)
    for name in _BY_CLIENT:
        if isinstance(table.get(name), Mapping):
            found[name] = {leaf: x[rows] for leaf, x in table[name].items()}
        elif name in table:
            found[name] = table[name][rows]
    return found
