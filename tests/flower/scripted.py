"""A Flower grid without a network: sites in this process, and a script that says when and how each message is answered.

Time is the script's own, so that a deadline of a minute costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Error, Message
from flwr.supercore.task_identity import TaskIdentity

from mixfed.backends.clock import RealClock
from mixfed.backends.federation import Terms
from mixfed.backends.flower.post import FlowerBackend, from_record, to_record
from mixfed.backends.parcels import Parcel
from mixfed.backends.site import Holding, Site
from mixfed.core.algorithm import Algorithm
from mixfed.data.store import FederatedData
from mixfed.evaluate.metrics import metric_sums

EXPERIMENT = "scripted"


@dataclass
class Fate:
    """What becomes of a message: after how long it is answered (infinite: never), how often, and with what."""

    delay: float = 0.5
    times: int = 1
    change: Callable[[Parcel], Parcel] = lambda parcel: parcel
    error: str = ""


Script = Callable[[int, Parcel], Fate]


@dataclass
class ScriptedGrid:
    """The grid that a server sees."""

    sites: dict[int, Site]
    script: Script = lambda node, parcel: Fate()
    now: float = 0.0
    sent: list[tuple[int, Parcel]] = field(default_factory=list)
    _replies: list[tuple[float, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def get_node_ids(self) -> list[int]:
        return list(self.sites)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            names.append(f"message-{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            node, parcel = message.metadata.dst_node_id, from_record(message.content)
            self.sent.append((node, parcel))
            fate = self.script(node, parcel)
            if node in self.sites and np.isfinite(fate.delay):
                for _ in range(fate.times):
                    self._replies.append((self.now + fate.delay, self._reply(node, message, parcel, fate)))
        return names

    def _reply(self, node: int, message: Message, parcel: Parcel, fate: Fate) -> Message:
        if fate.error:
            return Message(Error(2, fate.error), reply_to=message)
        return Message(to_record(fate.change(self.sites[node].answer(parcel))), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        due = [m for at, m in self._replies if at <= self.now and m.metadata.reply_to_message_id in wanted]
        self._replies = [(at, m) for at, m in self._replies if m not in due]
        return due

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def backend(self, **options: Any) -> FlowerBackend:
        """A backend on this grid and its clock."""
        terms = Terms(deadline=10.0, assemble=5.0)
        clock = RealClock(terms.deadline, tick=lambda: self.now, sleep=self.sleep)
        return FlowerBackend(self, EXPERIMENT, terms, clock=clock, **options)  # type: ignore[arg-type]


def sites_of(
    algorithm: Algorithm,
    data: FederatedData,
    folder: Path,
    *,
    count: int = 4,
    tests: Mapping[str, FederatedData] | None = None,
    first: int = 1,
    executor: str = "loop",
) -> dict[int, Site]:
    """All clients on so many sites; client c is at site c mod count."""
    found = {}
    for i in range(count):
        mine = np.arange(i, len(data), count)
        own = {name: test.select(mine) for name, test in (tests or {}).items()}
        holding = Holding(mine.tolist(), data.select(mine), own)
        found[first + i] = Site(
            algorithm, {"clients": holding}, EXPERIMENT, folder / str(i), measure=metric_sums, executor=executor
        )
    return found
