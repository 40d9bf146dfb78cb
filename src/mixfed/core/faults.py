"""Updates that are no good: which clients sent them, how often, and how far off they were.

A client drops its own update where a number in it is not finite, or where its norm is beyond the bound that the
algorithm has for it (:attr:`mixfed.core.algorithm.Algorithm.bound`). Beside every update a client tells the norm of it.
So the server sees an update that is finite and yet absurd, without a look into it: one that is more than ``ABSURD``
times as long as the median of its round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

FEW = 5
"""So few updates say little: a run is not stopped for them, and they are not compared with each other alone."""
ABSURD = 1e3
_SHOWN = 3

Kind = Literal["not finite", "beyond the bound", "unusable", "absurd"]


@dataclass
class Fault:
    """What was wrong, how many ``times``, with updates of one client.

    ``norm`` is the largest of those that are finite, ``round`` the one that asked for it (counted from 1), and
    ``typical`` the median norm in that round.
    """

    kind: Kind
    source: str
    client: int
    times: int = 0
    round: int = 0
    norm: float = 0.0
    typical: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times as long as the median the longest of them was; 0 where there is no median."""
        return self.norm / self.typical if self.typical else 0.0


class Faults:
    """All faults of a run."""

    def __init__(self) -> None:
        self._found: dict[tuple[Kind, str, int], Fault] = {}
        self._last: dict[str, list[float]] = {}

    def all(self) -> list[Fault]:
        """Every fault, in the order in which they first came."""
        return list(self._found.values())

    def note(self, source: str, round: int, norms: Mapping[int, float], dropped: Collection[int]) -> None:
        """Looks at the norms of a round's updates, dropped ones among them.

        The median is that of the round. Where fewer than ``FEW`` updates came, the last ones before count too. What was
        dropped and has no norm was nothing that the server could use.
        """
        norms = dict(sorted(norms.items()))  # whoever was heard first
        finite = [norm for norm in norms.values() if math.isfinite(norm)]
        compared = (self._last.get(source, []) + finite)[-max(len(finite), FEW) :]
        self._last[source] = compared[-FEW:]
        typical = median(compared)
        for client in sorted(dropped):
            norm = norms.get(client, math.nan)
            kind: Kind = "not finite" if client in norms else "unusable"
            self._add("beyond the bound" if math.isfinite(norm) else kind, source, client, round, norm, typical)
        if typical and max(finite, default=0.0) > ABSURD * typical:
            for client, norm in norms.items():
                if math.isfinite(norm) and norm > ABSURD * typical and client not in dropped:
                    self._add("absurd", source, client, round, norm, typical)

    def tree(self) -> dict[str, Any]:
        """The faults as a tree."""
        return {"found": [asdict(fault) for fault in self.all()], "last": self._last}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes up the faults of a checkpoint."""
        found = [Fault(**fault) for fault in saved["found"]]
        self._found = {(fault.kind, fault.source, fault.client): fault for fault in found}
        self._last = dict(saved["last"])

    def _add(self, kind: Kind, source: str, client: int, round: int, norm: float, typical: float) -> None:
        fault = self._found.setdefault((kind, source, client), Fault(kind, source, client))
        fault.times += 1
        if norm > fault.norm:
            fault.norm, fault.typical, fault.round = norm, typical, round + 1


def told(faults: Sequence[Fault]) -> list[str]:
    """A sentence for each kind of fault that there is: how often, and which clients."""
    sentences: dict[Kind, str] = {
        "not finite": "{updates} had a number that is not finite and {were} dropped: {who}.",
        "beyond the bound": "{updates} {were} longer than the bound allows and {were} dropped: {who}.",
        "unusable": "{updates} could not be used and {were} dropped: {who}.",
        "absurd": "{updates} {were} more than {times:,.0f} times as long as the median of {their} round: {who}.",
    }
    found = []
    for kind, sentence in sentences.items():
        these = sorted((f for f in faults if f.kind == kind), key=lambda fault: -fault.times)
        if these:
            names = [f"client {f.client} of '{f.source}' ({f.times})" for f in these[:_SHOWN]]
            others = [f"{len(these) - _SHOWN} others"] if len(these) > _SHOWN else []
            count = sum(fault.times for fault in these)
            one = {"updates": "1 client update", "were": "was", "their": "its"}
            many = {"updates": f"{count} client updates", "were": "were", "their": "their"}
            words = one if count == 1 else many
            found.append(sentence.format(**words, times=ABSURD, who=", ".join(names + others)))
    return found


def worst(faults: Sequence[Fault]) -> Fault | None:
    """The absurd update that was longest beside its median."""
    return max((fault for fault in faults if fault.kind == "absurd"), key=lambda fault: fault.ratio, default=None)


def suggested_bound(fault: Fault) -> float:
    """A bound that ordinary updates stay far below: ten times the median, in one digit."""
    return float(f"{10 * fault.typical:.0e}")


def median(norms: Sequence[float]) -> float:
    """The median of the norms above 0 (of two in the middle, the smaller); 0 where fewer than two are to compare."""
    found = sorted(norm for norm in norms if norm > 0)
    return found[(len(found) - 1) // 2] if len(found) > 1 else 0.0
