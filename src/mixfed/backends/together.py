"""Clients of a site that were sent work in one parcel run as one cohort, by the simulator's executors.

What each of them answers is what its own runtime (:mod:`mixfed.backends.runtime`) would answer, to round-off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mixfed.backends import wire
from mixfed.backends.runtime import Keeps, report
from mixfed.backends.simulator.choice import Chooser, is_batched_well
from mixfed.backends.simulator.executors import Cohort, execute
from mixfed.backends.simulator.gathered import Gathered, index
from mixfed.backends.work import norm_of
from mixfed.core.algorithm import Algorithm, Message, Private
from mixfed.core.backend import Run
from mixfed.core.batches import Plan, plan_devices
from mixfed.core.ledger import Ledger
from mixfed.core.private import PrivateStore
from mixfed.core.schedule import Schedule
from mixfed.data.store import CentralData, FederatedData
from mixfed.transforms.rows.select import ask

MEMORY = 2 << 30


def executor_of(algorithm: Algorithm, executor: str) -> str:
    """The executor of a site. ``auto`` times nothing there, so that all sites choose alike."""
    if executor != "auto":
        return executor
    return "factored" if is_batched_well(algorithm.model) else "loop"


class Devices(PrivateStore):
    """What the clients of a site keep, each in a place of its own, as executors ask for it."""

    def __init__(self, initial: Private, kept: Mapping[tuple[str, int], Keeps]) -> None:
        super().__init__(lambda: initial)
        self._kept = kept

    def get(self, source: str, client: int, first: Private | None = None) -> Private:
        """One client's private part."""
        return self._kept[source, client].get(source, client, first)

    def put(self, source: str, client: int, private: Private) -> None:
        """Keeps one client's private part."""
        self._kept[source, client].put(source, client, private)

    def gather(self, source: str, clients: Sequence[int], first: Private | None = None) -> Private:
        """Those parts that all of these clients have, each leaf with a first dimension over them."""
        each = [self.get(source, client, first) for client in clients]
        common = [part for part in each[0] if all(part in one for one in each)]
        return {part: {n: torch.stack([one[part][n] for one in each]) for n in each[0][part]} for part in common}


class Together:
    """The clients of one source on a site.

    ``data`` are the examples of all of them, and ``numbers`` their numbers in the population, in that order.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        source: str,
        data: FederatedData,
        numbers: Sequence[int],
        executor: str,
        devices: Devices,
    ) -> None:
        self.algorithm, self.source, self.data = algorithm, source, data
        self._places = {int(number): place for place, number in enumerate(numbers)}
        self._devices = devices
        self._plain = replace(algorithm, uploads="each", decode=None, bound=None)
        self._chooser = Chooser(executor, None, None, MEMORY, lambda sentence: None, {})
        run = Run(self._plain, {source: data}, {}, Schedule(1), 0, Ledger())
        self._chooser.start(run, self._devices)

    def answer(self, clients: Sequence[int], requests: Sequence[bytes], common: wire.Unpacked) -> list[bytes]:
        """Answers the requests of these clients to train, in their order."""
        device = self.algorithm.model.device
        own = [wire.unpack(request, device) for request in requests]
        header = common[0] | own[0][0]
        plan = self._plan(clients, header, [trees.get("examples") or {} for _, trees in own])
        first = {part: x for _, trees in own for part, x in (trees.get("first") or {}).items()}
        payload = self._with_rows(common[1]["payload"], plan, [trees.get("rows", {}) for _, trees in own])
        message = Message(payload, int(header["round"]), first=first or None)
        how = self._chooser.how(message, plan)
        part = Cohort.alike(message, plan, how)
        ((done,),) = execute(self._plain, [part], self._devices, self._chooser.pool)
        return self._reports(done, plan, message)

    def _reports(self, done: Gathered, plan: Plan, message: Message) -> list[bytes]:
        cost = self._chooser.cost(plan, message)
        uploads = dict(done.uploads)
        privates = {c: index(private, i) for clients, private in done.private for i, c in enumerate(clients)}
        found = []
        for place, client in enumerate(plan.clients.tolist()):
            upload, private, norm = uploads.get(client), privates.get(client, {}), done.norms[client]
            if upload is not None:
                norm = norm_of(replace(upload, values=self.algorithm.decoded(upload.values)), private)
            found.append(report(self.algorithm, plan, place, cost, norm, upload, private, self._devices))
        return found

    def _plan(self, clients: Sequence[int], header: Mapping[str, Any], examples: list[dict[str, Any]]) -> Plan:
        """The batches of these clients, with the central examples that each received."""
        data = self.data.select(np.array([self._places[client] for client in clients]))
        counts = [len(next(iter(some.values()))) if some else 0 for some in examples]
        received = None
        if any(counts):
            full = [some for some in examples if some]
            arrays = {name: np.concatenate([some[name].cpu().numpy() for some in full]) for name in full[0]}
            received = CentralData(arrays, None if header["prepared"] else data.prepare)
        batching, seed, round = self.algorithm.batching[self.source], int(header["seed"]), int(header["round"])
        return plan_devices(self.source, data, clients, batching, seed, round, received, counts if received else None)

    def _with_rows(self, payload: dict[str, Any], plan: Plan, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The payload with tables in which the rows are that these clients were sent; no other is ever looked up."""
        tables, shapes = self.algorithm.rows.tables, self.algorithm.model.shapes
        whole = {part: dict(leaves) for part, leaves in payload.items()}
        for place, sent in enumerate(rows if tables else []):
            batches = plan.client(place, self.algorithm.model.device)
            wanted = ask(tables, {t: shapes[t][0] for t in tables}, batches, [int(plan.clients[place])])
            for part, leaves in sent.items():
                for t, x in leaves.items():
                    table = whole[part].setdefault(t, x.new_zeros(shapes[t]))
                    table.index_copy_(0, wanted.rows[t][0], x[: wanted.rows[t].shape[1]])
        return whole
