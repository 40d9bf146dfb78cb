"""The client's half: a device with its own examples and its own private parts, which answers bytes with bytes.

A device knows the algorithm, its own data and its own number. Everything else is in the requests: which round and seed,
the common model, central examples and first private parts if there are any, the rows of tables that it asked for. Three
requests are answered:

- ``prepare``: what the device needs of the next message: row ids, how many central examples, which parts it lacks;
- ``train``: a round's work; the answer has the norm of the update, and the update itself unless the device drops it;
- ``evaluate``: sums of metrics of the device's own model over its own examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mixfed.backends import wire
from mixfed.backends.work import as_convolved, bytes_of_own, client_work, fits, norm_of
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches, Plan, Sample, plan_devices
from mixfed.core.ledger import Cost, Ledger, count_work
from mixfed.core.tree import Params
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError, explained
from mixfed.transforms.rows.select import RowDelivery, RowRequest, ask

Measure = Callable[[Algorithm, Params, CentralData, Sequence[str]], dict[str, float]]
"""Sums of metrics over examples, and their number under ``examples``."""


class Keeps(Protocol):
    """Where a device's private parts are: :class:`mixfed.core.private.PrivateStore`, or files on its own disk."""

    def get(self, source: str, client: int, first: Private | None = None) -> Private: ...

    def put(self, source: str, client: int, private: Private) -> None: ...

    def seen(self, source: str) -> Sized: ...

    def lacking(self, source: str, part: str, clients: NDArray[np.int64]) -> int: ...


class ClientRuntime:
    """One client of the population ``source``, with its number there.

    ``data`` are the client's own examples, ``tests`` those that it keeps apart for an evaluation, by name, and
    ``measure`` is how it evaluates. ``privates`` is what the device keeps, in memory or on its disk.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        source: str,
        client: int,
        data: FederatedData,
        privates: Keeps,
        *,
        tests: Mapping[str, CentralData] | None = None,
        measure: Measure | None = None,
    ) -> None:
        self.algorithm, self.source, self.client = algorithm, source, client
        self.data, self.privates = data, privates
        self.tests, self.measure = tests or {}, measure
        self._ledger = Ledger()

    def answer(self, request: bytes, common: wire.Unpacked = ({}, {})) -> bytes:
        """Answers one request. What several clients are sent alike may come apart, unpacked, as ``common``."""
        header, trees = wire.unpack(request, self.algorithm.model.device)
        header, trees = common[0] | header, common[1] | trees
        answers = {"prepare": self._prepare, "train": self._train, "evaluate": self._evaluate}
        if header.get("kind") not in answers:
            raise InputError(f"A client answers {', '.join(answers)}, not '{header.get('kind')}'.")
        return answers[header["kind"]](header, trees)

    def _prepare(self, header: Mapping[str, Any], trees: Mapping[str, Any]) -> bytes:
        """The ids of the rows of tables (by the fields that index them), the number of examples, the parts lacked."""
        asked = {part: self.privates.lacking(self.source, part, _one(self.client)) > 0 for part in header["first"]}
        count = 0
        if header["sample"] is not None:
            count = int(Sample(**header["sample"]).sizes(_one(self.data.examples), header["available"])[0])
        told: dict[str, Any] = {"examples": count, "lacks": [part for part, yes in asked.items() if yes], "touched": {}}
        ids: Params = {}
        if self.algorithm.rows:
            batches = self._plan(header["round"], header["seed"]).client(0, self.algorithm.model.device)
            wanted, named = self._wanted(batches), named_once(self.algorithm.rows.tables)
            ids = {t: wanted.rows[t][0].to(torch.int32) for t in named}
            told["touched"] = {t: len(wanted.ids[t]) for t in named}
        return wire.pack(told, {"ids": ids})

    def _train(self, header: Mapping[str, Any], trees: Mapping[str, Any]) -> bytes:
        algorithm, round = self.algorithm, int(header["round"])
        received = self._received(header, trees.get("examples") or {})
        plan = self._plan(round, int(header["seed"]), received)
        rows = trees.get("rows", {})
        payload = {part: leaves | rows.get(part, {}) for part, leaves in trees["payload"].items()}
        message = Message(payload, round, first=trees.get("first") or None)
        if algorithm.model.has_convolutions:
            message = as_convolved(message)
        private = self.privates.get(self.source, self.client, message.first)
        with torch.no_grad(), explained(f"Client {self.client} of '{self.source}' cannot train"):
            cost = self._ledger.cost(self.source, lambda n: self._work(plan, message, private, n))
            batches = plan.client(0, algorithm.model.device)
            upload, private = client_work(algorithm, message, private, batches, self._picked(batches, message))
            norm = norm_of(replace(upload, values=algorithm.decoded(upload.values)), private)
        return report(algorithm, plan, 0, cost, norm, upload, private, self.privates)

    def _evaluate(self, header: Mapping[str, Any], trees: Mapping[str, Any]) -> bytes:
        on = header["on"]
        if self.measure is None or on not in self.tests:
            raise InputError(f"Client {self.client} of '{self.source}' has no {on} examples of its own.")
        params: Params = trees["params"]
        if self.algorithm.personal is not None and len(self.privates.seen(self.source)):
            params = self.algorithm.personal(params, self.privates.get(self.source, self.client))
        return wire.pack({"sums": self.measure(self.algorithm, params, self.tests[on], header["metrics"])})

    def _plan(self, round: int, seed: int, received: CentralData | None = None) -> Plan:
        batching = self.algorithm.batching[self.source]
        counts = [len(received)] if received else None
        return plan_devices(self.source, self.data, [self.client], batching, seed, round, received, counts)

    def _received(self, header: Mapping[str, Any], examples: Mapping[str, Any]) -> CentralData | None:
        if not examples:
            return None
        arrays = {name: x.cpu().numpy() for name, x in examples.items()}
        return CentralData(arrays, None if header["prepared"] else self.data.prepare)

    def _wanted(self, batches: Batches) -> RowRequest:
        tables = self.algorithm.rows.tables
        return ask(tables, {t: self.algorithm.model.shapes[t][0] for t in tables}, batches, [self.client])

    def _picked(self, batches: Batches, message: Message) -> RowDelivery | None:
        """The rows that these batches look up, which are the first of those in the message."""
        if not self.algorithm.rows:
            return None
        wanted = self._wanted(batches)
        rows = {
            part: {t: x[: wanted.rows[t].shape[1]] for t, x in leaves.items() if t in wanted.tables}
            for part, leaves in message.payload.items()
        }
        return RowDelivery(**vars(wanted), payload=rows)

    def _work(self, plan: Plan, message: Message, private: Private, examples: int) -> tuple[int, int]:
        """What a step on so many examples costs."""
        batches = plan.client(0, self.algorithm.model.device).first(examples)
        picked = self._picked(batches, message)
        return count_work(lambda: client_work(self.algorithm, message, private, batches, picked))


def report(
    algorithm: Algorithm,
    plan: Plan,
    place: int,
    cost: Cost,
    norm: float,
    upload: Upload | None,
    private: Private,
    privates: Keeps,
) -> bytes:
    """What the client at this place of a plan answers after its work; unless it drops its update, it keeps its own."""
    told: dict[str, Any] = {
        "norm": norm,
        "sent": upload is not None and fits(norm, algorithm.bound),
        "steps": int(plan.steps[place]),
        "examples": int(plan.examples[place]),
        "cost": [cost.base, cost.slope, cost.products],
    }
    if upload is None or not told["sent"]:
        return wire.pack(told)
    privates.put(plan.source, int(plan.clients[place]), private)
    told["own_bytes"] = bytes_of_own(algorithm, private)
    return wire.pack(told, {"values": upload.values, "weight": upload.weight})


def _one(number: int) -> NDArray[np.int64]:
    return np.array([number], np.int64)


def named_once(tables: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The tables whose row ids are sent: one for all that are indexed by the same fields."""
    return [t for t, names in tables.items() if next(u for u in tables if tables[u] == names) == t]


def for_every_table(tables: Mapping[str, tuple[str, ...]], named: Mapping[str, Any]) -> dict[str, Any]:
    """The same for every table, from what was sent once for all that are indexed alike."""
    return {t: next(x for n, x in named.items() if tables[n] == names) for t, names in tables.items()}
