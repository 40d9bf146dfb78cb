"""A backend that passes nothing but bytes between the server and its clients, all in this process.

It shows that an algorithm can run over a network: every message is serialised, handed as bytes to a client runtime that
knows nothing of the server or of other clients, and answered with bytes. It is slow and useful for debugging. The
numbers are the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from mixfed.backends import wire
from mixfed.backends.aggregate import WeightedSum, in_order, single
from mixfed.backends.clock import VirtualClock
from mixfed.backends.messages import Messages
from mixfed.backends.runtime import ClientRuntime, Measure, for_every_table
from mixfed.core import tree
from mixfed.core.algorithm import CLIENTS, Message, Reply, Upload
from mixfed.core.backend import Collected, Question, Reports, Run
from mixfed.core.batches import drawn_for
from mixfed.core.jobs import Jobs
from mixfed.core.ledger import Cost
from mixfed.core.private import PrivateStore
from mixfed.core.tree import Params
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.transforms.rows.select import ID_BYTES, serve, shared


class Loopback:
    """Clients behind bytes. ``tests`` are the examples that clients keep apart for evaluations, by name (test,
    validation), and ``measure`` is how they evaluate.

    ``wire_down`` and ``wire_up`` count the bytes that were passed, and ``frames_down`` and ``frames_up`` how many of
    these may be headers and framing (:func:`mixfed.backends.wire.overhead`).
    """

    def __init__(self, tests: Mapping[str, FederatedData] | None = None, measure: Measure | None = None) -> None:
        self._tests, self._measure = tests or {}, measure
        self.wire_down = self.wire_up = self.frames_down = self.frames_up = 0
        self.runtimes: dict[tuple[str, int], ClientRuntime] = {}

    def start(self, run: Run, saved: Mapping[str, Any] | None) -> None:
        """Takes up a run, with the requests in flight and the devices of its checkpoint if it has one."""
        self.run, self.algorithm, self.ledger = run, run.algorithm, run.ledger
        self.runtimes.clear()
        self._requests: dict[tuple[str, int], bytes] = {}
        self._ids: dict[tuple[str, int], Params] = {}
        self._keepers: set[int] = set()
        device = run.algorithm.model.device
        self._messages = {source: Messages("device", device) for source in run.algorithm.batching}
        for source, requests in (saved or {}).get("requests", {}).items():
            for number, block in requests.items():
                self._requests[source, int(number)] = block.cpu().numpy().tobytes()
        for source, devices in (saved or {}).get("devices", {}).items():
            for client, private in devices.items():
                self._runtime(source, int(client)).privates.restore(tree.to_device(private, device))
                self._keepers |= {int(client)} if source == CLIENTS and private else set()
        for source, by_number in (saved or {}).get("ids", {}).items():
            self._ids |= {(source, int(number)): tree.to_device(ids, device) for number, ids in by_number.items()}
        for source, messages in (saved or {}).get("messages", {}).items():
            self._messages[source].restore(messages)
        self.clock = VirtualClock(run)

    def state(self) -> dict[str, Any]:
        """The requests that have not been delivered, and what every device keeps."""
        requests: dict[str, dict[str, Any]] = {source: {} for source in self.algorithm.batching}
        for (source, number), block in self._requests.items():
            requests[source][str(number)] = torch.frombuffer(bytearray(block), dtype=torch.uint8)
        devices: dict[str, dict[str, Any]] = {source: {} for source in self.algorithm.batching}
        for (source, client), runtime in self.runtimes.items():
            devices[source][str(client)] = runtime.privates.tree()
        messages = {source: kept.tree() for source, kept in self._messages.items()}
        ids: dict[str, dict[str, Any]] = {source: {} for source in self.algorithm.batching}
        for (source, number), rows in self._ids.items():
            ids[source][str(number)] = rows
        return {"requests": requests, "ids": ids, "devices": devices, "messages": messages}

    def clients(self) -> Loopback:
        """The devices, which answer questions; their private parts stay with them."""
        return self

    def submit(self, jobs: Jobs, message: Message) -> None:
        """Asks each client what it needs, and makes its request, which is delivered when the client is to report."""
        if self.algorithm.rows:
            self._messages[jobs.source].add(message)
        for client, number in zip(jobs.clients.tolist(), jobs.numbers.tolist(), strict=True):
            self._requests[jobs.source, number] = self._request(jobs.source, client, number, message)
        self.clock.sent(jobs)

    def wait(self, until: float, enough: int) -> Reports:
        """Lets virtual time pass."""
        for source, messages in self._messages.items():
            messages.keep_only(self.run.books[source].rounds())
        return self.clock.wait(until, enough)

    def collect(self, jobs: Jobs) -> Collected:
        """Delivers the requests of these jobs and takes what the clients answer, the smallest number first."""
        replies: list[Reply] = []
        dropped: list[int] = []
        for round, same in jobs.by_round():
            total, uploads = WeightedSum(), []
            for client, number in sorted(zip(same.clients.tolist(), same.numbers.tolist(), strict=True)):
                upload = self._deliver(jobs.source, client, number)
                if upload is None:
                    dropped.append(client)
                elif self.algorithm.uploads == "each":
                    uploads.append((client, upload))
                else:
                    total.add(client, upload)
            mean = total.result(jobs.source)
            made = [single(client, upload, jobs.source) for client, upload in uploads] + ([mean] if mean else [])
            if self.algorithm.rows:
                sent = self._messages[jobs.source].of(round)
                made = [replace(reply, message=sent) for reply in made]
            replies += made
        return Collected(in_order(replies, jobs) if self.algorithm.uploads == "each" else replies, dropped)

    def discard(self, jobs: Jobs, *, reported: bool) -> None:
        """Clients that report in vain have trained and keep what is theirs; those that are lost got no request."""
        if not reported:
            self.clock.forget(jobs)
        for client, number in zip(jobs.clients.tolist(), jobs.numbers.tolist(), strict=True):
            if reported:
                self._deliver(jobs.source, client, number, wanted=False)
            else:
                del self._requests[jobs.source, number]
                self._ids.pop((jobs.source, number), None)

    def ask(self, params: Params, question: Question) -> dict[str, float]:
        """A federated evaluation: every client answers with sums over its own examples."""
        request = wire.pack(
            {"kind": "evaluate", "on": question.on, "metrics": list(question.metrics)}, {"params": params}
        )
        sums: dict[str, float] = {}
        for client in question.clients.tolist():
            told, _ = wire.unpack(self._runtime(CLIENTS, client).answer(request))
            sums = {name: sums.get(name, 0.0) + value for name, value in told["sums"].items()}
        return {name: sums[name] / sums["examples"] for name in question.metrics}

    def _runtime(self, source: str, client: int) -> ClientRuntime:
        """The device of a client, which is made when it is first reached."""
        if (source, client) not in self.runtimes:
            untouched = self.algorithm.own.first(self.algorithm.model.initial())
            tests = {
                name: CentralData(data.client(client), data.prepare)
                for name, data in self._tests.items()
                if source == CLIENTS and data.sizes(np.array([client]))[0] > 0
            }
            self.runtimes[source, client] = ClientRuntime(
                self.algorithm,
                source,
                client,
                self.run.data[source].select(np.array([client])),
                PrivateStore(lambda: untouched),
                tests=tests,
                measure=self._measure,
            )
        return self.runtimes[source, client]

    def _request(self, source: str, client: int, number: int, message: Message) -> bytes:
        """What one client is sent: the payload, the rows it named, its central examples, the parts it lacks."""
        tables = self.algorithm.rows.tables
        trees: dict[str, Any] = {"payload": shared(tables, message.payload)}
        header = {"kind": "train", "round": message.round, "seed": self.run.seed, "prepared": False}
        if tables or message.examples or message.first:
            wanted, found = self._prepare(source, client, message)
            trees["first"] = {part: (message.first or {})[part] for part in wanted["lacks"]}
            if message.examples and wanted["examples"]:
                trees["examples"], header["prepared"] = self._examples(source, client, message, wanted["examples"])
                self.ledger.bytes_down += tree.nbytes(trees["examples"])
            if tables:
                ids = for_every_table(tables, {t: x.long()[None] for t, x in found["ids"].items()})
                rows = serve(tables, message.payload, ids, many=False)
                trees["payload"] = {part: leaves | rows[part] for part, leaves in trees["payload"].items()}
                self._count_rows(rows, wanted["touched"])
                self._ids[source, number] = {t: x[0] for t, x in ids.items()}
        block = wire.pack(header, trees)
        self.wire_down += len(block)
        self.frames_down += wire.overhead(trees)
        self.ledger.bytes_down += tree.nbytes(shared(tables, trees["payload"])) + tree.nbytes(trees.get("first", {}))
        return block

    def _count_rows(self, rows: Mapping[str, Params], touched: Mapping[str, int]) -> None:
        """Counts the rows that are really looked up (a client that looks up none is sent one all the same)."""
        real = for_every_table(self.algorithm.rows.tables, touched)
        self.ledger.bytes_up += ID_BYTES * sum(touched.values())
        for leaves in rows.values():
            self.ledger.bytes_down += sum(tree.nbytes({t: x[: real[t]]}) for t, x in leaves.items())

    def _prepare(self, source: str, client: int, message: Message) -> tuple[dict[str, Any], dict[str, Any]]:
        sample = message.examples
        if sample and sample.source not in self.run.central:
            raise InputError(f"Example transfer sends central data '{sample.source}', and the run was given none.")
        asked = wire.pack(
            {
                "kind": "prepare",
                "round": message.round,
                "seed": self.run.seed,
                "first": list(message.first or {}),
                "sample": asdict(sample) if sample else None,
                "available": len(self.run.central[sample.source]) if sample else 0,
            }
        )
        told = self._runtime(source, client).answer(asked)
        header, trees = wire.unpack(told, self.algorithm.model.device)
        self.wire_down += len(asked)
        self.wire_up += len(told)
        self.frames_down += wire.overhead({})
        self.frames_up += wire.overhead(trees)
        return header, trees

    def _examples(self, source: str, client: int, message: Message, count: int) -> tuple[dict[str, Any], bool]:
        """A client's central examples; as they are stored where client and centre prepare theirs alike."""
        assert message.examples is not None
        central = self.run.central[message.examples.source]
        rows = drawn_for(source, client, self.run.seed, message.round, count, len(central))
        fields = {name: torch.from_numpy(np.take(x, rows, axis=0)) for name, x in central.arrays.items()}
        if central.prepare is self.run.data[source].prepare:
            return fields, False
        return (central.prepare(fields) if central.prepare else fields), True

    def _deliver(self, source: str, client: int, number: int, *, wanted: bool = True) -> Upload | None:
        """Hands a request over and takes the answer; None where a number in the update is not finite."""
        answer = self._runtime(source, client).answer(self._requests.pop((source, number)))
        told, trees = wire.unpack(answer, self.algorithm.model.device)
        self.ledger.count_clients(Cost(*told["cost"]), told["steps"], told["examples"])
        if wanted:
            self.wire_up += len(answer)
            self.frames_up += wire.overhead(trees)
            self.ledger.bytes_up += tree.nbytes(trees.get("values", {}))
        if told["finite"] and source == CLIENTS and told["own_bytes"]:
            self._keepers.add(client)
            self.ledger.bytes_once = told["own_bytes"] * len(self._keepers)
        if not told["finite"] or not wanted:
            self._ids.pop((source, number), None)
            return None
        values, ids = self.algorithm.decoded(trees["values"]), self._ids.pop((source, number), {})
        sent = {t: len(leaves[t]) for leaves in values.values() for t in leaves if t in ids}
        return Upload(values, trees["weight"], {t: x[: sent[t]] for t, x in ids.items()})
