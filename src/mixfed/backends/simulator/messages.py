"""Messages that are on their way: kept until the last client has reported, once for all rounds that sent the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mixfed.core import tree
from mixfed.core.algorithm import Message
from mixfed.core.batches import Sample
from mixfed.core.storage import Place, moved
from mixfed.core.tree import Params


@dataclass
class Parts:
    """The tensors of a message; rounds between which the server made no step send the same ones, kept once."""

    payload: dict[str, Params]
    first: dict[str, Params]
    is_kept: bool = False

    def are_those_of(self, message: Message) -> bool:
        """Whether the message has the same values; after a resume they are not the same tensors."""
        ours, theirs = tree.flatten(self.tree()), tree.flatten(Parts(message.payload, message.first or {}).tree())
        return ours.keys() == theirs.keys() and all(_same(x, theirs[n]) for n, x in ours.items())

    def keep_at(self, place: Place) -> None:
        """Moves them to this place."""
        if not self.is_kept and place != "device":
            self.payload, self.first = tree.map_leaves(lambda x: moved(x, place), self.tree()).values()
            self.is_kept = True

    def tree(self) -> dict[str, Any]:
        return {"payload": self.payload, "first": self.first}

    @cached_property
    def nbytes(self) -> int:
        """What they weigh, wherever they are."""
        return tree.nbytes(self.tree())


@dataclass(frozen=True)
class Sent:
    """A message on its way, its tensors apart, and the clients that have not reported on it yet.

    ``counted`` says that the ledger has its rows.
    """

    message: Message
    parts: Parts
    clients: NDArray[np.int64]
    counted: bool = False

    def whole(self, device: torch.device) -> Message:
        """The message on this device."""
        there = tree.map_leaves(lambda x: x.to(device), self.parts.tree())
        return replace(self.message, payload=there["payload"], first=there["first"] or None)


def saved(by_round: Mapping[int, Sent]) -> dict[str, Any]:
    """The messages of one source as a tree; ``parts`` has the number of the round whose tensors they are."""
    owner: dict[int, int] = {}
    for number, sent in sorted(by_round.items()):
        owner.setdefault(id(sent.parts), number)
    rounds = {
        str(number): {
            "parts": owner[id(sent.parts)],
            "round": sent.message.round,
            "examples": asdict(sent.message.examples) if sent.message.examples else {},
            "clients": torch.from_numpy(sent.clients),
        }
        for number, sent in by_round.items()
    }
    return {"rounds": rounds, "parts": {str(n): by_round[n].parts.tree() for n in owner.values()}}


def restored(saved: Mapping[str, Any], device: torch.device) -> dict[int, Sent]:
    there = tree.map_leaves(lambda x: x.to(device), saved["parts"])
    parts = {int(n): Parts(x["payload"], x["first"]) for n, x in there.items()}
    found = {}
    for number, sent in saved["rounds"].items():
        examples = Sample(**sent["examples"]) if sent["examples"] else None
        message = Message({}, int(sent["round"]), examples)
        clients = sent["clients"].cpu().numpy()
        found[int(number)] = Sent(message, parts[int(sent["parts"])], clients, counted=True)  # a round has ended
    return found


def _same(x: Any, y: Any) -> bool:
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return x is y or torch.equal(x, y.to(x.device))
