"""What an algorithm sends down and up, found out before the first round by one that leads nowhere.

Transforms look here when they are built, so that what cannot work is refused then, in a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mixfed.core import tree
from mixfed.core.algorithm import CENTRE, Algorithm, Message, Private, Server
from mixfed.core.batches import Batches
from mixfed.core.model import IDLE
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params

Trees = dict[str, Params]

FAR = 1 << 20
"""A round in which any first phase of an algorithm (a warm start, rounds at the centre) is over."""


class _Nowhere(Server):
    """A server without data, whose gradients are zero."""

    def gradient(self, trainer: LocalTrainer, params: Params, *, source: str | None = CENTRE) -> Params:
        return tree.zeros(tree.cast(self.model.trained(params), self.model.dtype))


@dataclass(frozen=True)
class Travels:
    """By source: the messages of the first round and of a far one, and the trees that come up in answer."""

    messages: dict[str, list[Message]]
    uploads: dict[str, list[Trees]]

    def down(self, source: str) -> Trees:
        """The trees that go down to this source, each with all leaves that it has in some round."""
        return _joined([message.payload for message in self.messages.get(source, [])])

    def up(self) -> Trees:
        """The trees that come up, each with all leaves that it has in some round."""
        return _joined([values for found in self.uploads.values() for values in found])


def what_travels(algorithm: Algorithm) -> Travels:
    """Messages and uploads of a client without examples."""
    state = algorithm.init(algorithm.model.initial())
    messages: dict[str, list[Message]] = {}
    uploads: dict[str, list[Trees]] = {}
    for round in (0, FAR):
        sent, _ = algorithm.broadcast(state, _Nowhere(round, 0, algorithm.model))
        for source, message in sent.items():
            messages.setdefault(source, []).append(message)
            private = algorithm.own.first(algorithm.model.initial()) | (message.first or {})
            uploads.setdefault(source, []).append(idle_upload(algorithm, message, private, source, 1))
    return Travels(messages, uploads)


def idle_upload(algorithm: Algorithm, message: Message, private: Private, source: str, steps: int) -> Trees:
    """What a client sends up after so many steps without examples: what its optimizer does by itself."""
    device = algorithm.model.device
    nothing: dict[str, Any] = {IDLE: torch.zeros(steps, 0, device=device)}
    with torch.no_grad():
        batches = replace(Batches.without_data(steps, device), source=source, fields=nothing)
        return algorithm.client(message, private, batches)[0].values


def _joined(trees: list[Trees]) -> Trees:
    joined: Trees = {}
    for values in trees:
        for name, leaves in values.items():
            joined[name] = joined.get(name, {}) | leaves
    return joined
