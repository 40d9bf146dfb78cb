"""Messages to clients in flight: kept until the last client has reported, once for all rounds that sent the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from mixfed.core import tree
from mixfed.core.algorithm import Message
from mixfed.core.batches import Sample
from mixfed.core.storage import Place, moved
from mixfed.core.tree import Params


@dataclass
class Tensors:
    """The tensors of a message; rounds between which the server made no step send the same ones, kept once."""

    payload: dict[str, Params]
    first: dict[str, Params]
    is_kept: bool = False

    def are_those_of(self, message: Message) -> bool:
        """Whether the message has the same values; after a resume they are not the same tensors."""
        ours, theirs = tree.flatten(self.tree()), tree.flatten(Tensors(message.payload, message.first or {}).tree())
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


class Messages:
    """The messages of one source by round. Those of earlier rounds are kept at a ``place``."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self._place, self._device = place, device
        self._sent: dict[int, tuple[Message, Tensors]] = {}

    def add(self, message: Message) -> None:
        """Keeps the message of a round."""
        if message.round in self._sent:
            return
        last = self._sent[max(self._sent)][1] if self._sent else None
        same = last is not None and last.are_those_of(message)
        tensors = last if last is not None and same else Tensors(message.payload, message.first or {})
        for _, earlier in self._sent.values():
            earlier.keep_at(self._place)
        self._sent[message.round] = (replace(message, payload={}, first=None), tensors)

    def of(self, round: int) -> Message:
        """The message of this round, on the device."""
        message, tensors = self._sent[round]
        there = tree.map_leaves(lambda x: x.to(self._device), tensors.tree())
        return replace(message, payload=there["payload"], first=there["first"] or None)

    def keep_only(self, rounds: Collection[int]) -> None:
        """Lets the messages of other rounds go."""
        self._sent = {round: sent for round, sent in self._sent.items() if round in rounds}

    @property
    def nbytes(self) -> int:
        """What takes memory of the device: the tensors of all but the last message, which is the server's own model."""
        if not self._sent or self._place == "disk" or (self._place == "memory" and self._device.type != "cpu"):
            return 0
        last = self._sent[max(self._sent)][1]
        earlier = {id(tensors): tensors for _, tensors in self._sent.values() if tensors is not last}
        return sum(tensors.nbytes for tensors in earlier.values())

    def tree(self) -> dict[str, Any]:
        """The messages as a tree; ``tensors`` has the number of the round whose tensors they are."""
        owner: dict[int, int] = {}
        for round, (_, tensors) in sorted(self._sent.items()):
            owner.setdefault(id(tensors), round)
        rounds = {
            str(round): {
                "tensors": owner[id(tensors)],
                "examples": asdict(message.examples) if message.examples else {},
            }
            for round, (message, tensors) in self._sent.items()
        }
        return {"rounds": rounds, "tensors": {str(n): self._sent[n][1].tree() for n in owner.values()}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes up the messages of a checkpoint."""
        device = self._device if self._place == "device" else torch.device("cpu")
        there = tree.map_leaves(lambda x: x.to(device), saved["tensors"])
        tensors = {int(n): Tensors(x["payload"], x["first"]) for n, x in there.items()}
        for round, sent in saved["rounds"].items():
            examples = Sample(**sent["examples"]) if sent["examples"] else None
            self._sent[int(round)] = (Message({}, int(round), examples), tensors[int(sent["tensors"])])


def _same(x: Any, y: Any) -> bool:
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return x is y or torch.equal(x, y.to(x.device))
