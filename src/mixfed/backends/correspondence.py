"""The server's half of a conversation in bytes: what it writes to clients, and what it makes of their answers.

What carries the bytes is another's business: calls within this process (:mod:`mixfed.backends.loopback`) or a network
(:mod:`mixfed.backends.federation`). Both write the same letters, read the same answers, and count the same costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from mixfed.backends import wire
from mixfed.backends.aggregate import WeightedSum, in_order, single
from mixfed.backends.messages import Messages
from mixfed.backends.runtime import for_every_table
from mixfed.backends.work import fits, norm_of
from mixfed.core import tree
from mixfed.core.algorithm import CLIENTS, Algorithm, Message, Reply, Upload
from mixfed.core.backend import Collected, Question, Run
from mixfed.core.batches import drawn_for
from mixfed.core.jobs import Jobs
from mixfed.core.ledger import Cost
from mixfed.core.tree import Params
from mixfed.errors import InputError
from mixfed.transforms.rows.select import ID_BYTES, serve, shared
from mixfed.transforms.travel import what_travels


@dataclass(frozen=True)
class Letter:
    """A request to one client: ``common`` is what every client of the round is sent, ``own`` is for this one."""

    common: bytes
    own: bytes


def _refuse_rows_of_examples(algorithm: Algorithm) -> None:
    """A client names the rows that it needs before it knows the central examples that come with them."""
    if algorithm.rows and any(m.examples for sent in what_travels(algorithm).messages.values() for m in sent):
        raise InputError(
            f"The clients of {algorithm.name} receive central examples and exchange rows, and over bytes they cannot"
            " name the rows of examples that they have not received; leave out exchange_rows, or use the simulator."
        )


class Correspondence:
    """Letters to the clients of a run, and their answers.

    ``wire_down`` and ``wire_up`` count the bytes of all blocks, and ``frames_down`` and ``frames_up`` how many of these
    may be headers and framing (:func:`mixfed.backends.wire.overhead`). Jobs are known by (source, number). ``say`` is
    told of updates that are dropped because they fit no other.
    """

    def __init__(self, run: Run, say: Callable[[str], None] = lambda sentence: None) -> None:
        _refuse_rows_of_examples(run.algorithm)
        self.say = say
        self.run, self.algorithm, self.ledger = run, run.algorithm, run.ledger
        self.device = run.algorithm.model.device
        self.wire_down = self.wire_up = self.frames_down = self.frames_up = 0
        self._ids: dict[tuple[str, int], Params] = {}
        self._norms: dict[tuple[str, int], float] = {}
        self._keepers: set[int] = set()
        self._common: dict[str, tuple[int, bytes]] = {}
        self.messages = {source: Messages("device", self.device) for source in run.algorithm.batching}

    def state(self) -> dict[str, Any]:
        """What a resumed run must find again: messages that are still needed, row ids, who keeps something."""
        ids: dict[str, dict[str, Any]] = {source: {} for source in self.algorithm.batching}
        for (source, number), rows in self._ids.items():
            ids[source][str(number)] = rows
        messages = {source: kept.tree() for source, kept in self.messages.items()}
        return {"ids": ids, "messages": messages, "keepers": torch.tensor(sorted(self._keepers), dtype=torch.int64)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes up the correspondence of a checkpoint."""
        for source, by_number in saved["ids"].items():
            self._ids |= {(source, int(n)): tree.to_device(ids, self.device) for n, ids in by_number.items()}
        for source, messages in saved["messages"].items():
            self.messages[source].restore(messages)
        self._keepers = set(saved["keepers"].tolist())

    def forget_messages(self) -> None:
        """Lets go the messages of rounds that nobody in flight was asked in."""
        for source, messages in self.messages.items():
            messages.keep_only(self.run.books[source].rounds())

    def question(self, message: Message) -> bytes | None:
        """What a client is asked before its letter can be written; None where every client is sent the same."""
        if not (self.algorithm.rows or message.examples or message.first):
            return None
        sample = message.examples
        if sample and sample.source not in self.run.central:
            raise InputError(f"Example transfer sends central data '{sample.source}', and the run was given none.")
        return wire.pack(
            {
                "kind": "prepare",
                "round": message.round,
                "seed": self.run.seed,
                "first": list(message.first or {}),
                "sample": asdict(sample) if sample else None,
                "available": len(self.run.central[sample.source]) if sample else 0,
            }
        )

    def letter(
        self, source: str, client: int, number: int, message: Message, asked: bytes | None, answer: bytes | None
    ) -> Letter:
        """What one client is sent: the payload, the rows it named, its central examples, the parts it lacks.

        ``answer`` is what it said to what it was ``asked`` first, if it was.
        """
        tables = self.algorithm.rows.tables
        header: dict[str, Any] = {"prepared": False}
        trees: dict[str, Any] = {}
        if asked is not None and answer is not None:
            wanted, found = self._needs(asked, answer)
            trees["first"] = {part: (message.first or {})[part] for part in wanted["lacks"]}
            if message.examples and wanted["examples"]:
                trees["examples"], header["prepared"] = self._examples(source, client, message, wanted["examples"])
                self.ledger.bytes_down += tree.nbytes(trees["examples"])
            if tables:
                ids = for_every_table(tables, {t: x.long()[None] for t, x in found["ids"].items()})
                trees["rows"] = serve(tables, message.payload, ids, many=False)
                self._count_rows(trees["rows"], wanted["touched"])
                self._ids[source, number] = {t: x[0] for t, x in ids.items()}
        payload = shared(tables, message.payload)
        letter = Letter(self._common_block(source, message, payload), wire.pack(header, trees))
        self.wire_down += len(letter.common) + len(letter.own)
        self.frames_down += wire.overhead({"payload": payload}) + wire.overhead(trees)
        self.ledger.bytes_down += tree.nbytes(payload) + tree.nbytes(trees.get("first", {}))
        return letter

    def read(self, source: str, client: int, number: int, answer: bytes, *, wanted: bool = True) -> Upload | None:
        """The upload in an answer; None where it is not finite, or beyond the bound, or not wanted.

        An answer that is no upload of this model is refused.
        """
        told, trees = wire.unpack(answer, self.device)
        if "refused" in told:
            raise InputError(str(told["refused"]))
        ids = self._ids.pop((source, number), {})
        with _understood():
            self.ledger.count_clients(Cost(*told["cost"]), int(told["steps"]), int(told["examples"]))
            if wanted:
                self.wire_up += len(answer)
                self.frames_up += wire.overhead(trees)
                self.ledger.bytes_up += tree.nbytes(trees.get("values", {}))
            if told["sent"] and source == CLIENTS and told["own_bytes"]:
                self._keepers.add(client)
                self.ledger.bytes_once = int(told["own_bytes"]) * len(self._keepers)
            if wanted:
                self._norms[source, number] = float(told["norm"])
            if not told["sent"] or not wanted:
                return None
            values = self.algorithm.decoded(trees["values"])
            sent = {t: len(leaves[t]) for leaves in values.values() for t in leaves if t in ids}
            upload = Upload(values, trees["weight"], {t: x[: sent[t]] for t, x in ids.items()})
        self._check_shapes(upload)
        norm = self._norms[source, number] = norm_of(upload, {})
        return upload if fits(norm, self.algorithm.bound) else None

    def collected(self, jobs: Jobs, uploads: Mapping[int, Upload | None]) -> Collected:
        """The replies of jobs, from their uploads by number; the smallest client is added first."""
        replies: list[Reply] = []
        dropped: list[int] = []
        norms: dict[int, float] = {}
        for round, same in jobs.by_round():
            by_client = sorted(zip(same.clients.tolist(), same.numbers.tolist(), strict=True))
            there = {client: upload for client, number in by_client if (upload := uploads[number]) is not None}
            there = self._alike(jobs.source, there)
            told = {client: self._norms.pop((jobs.source, number), None) for client, number in by_client}
            norms |= {
                c: x for c, x in told.items() if x is not None and (c in there or not fits(x, self.algorithm.bound))
            }
            dropped += [client for client, _ in by_client if client not in there]
            total, each = WeightedSum(), []
            for client, upload in there.items():
                if self.algorithm.uploads == "each":
                    each.append(single(client, upload, jobs.source))
                else:
                    total.add(client, upload)
            mean = total.result(jobs.source)
            made = each + ([mean] if mean else [])
            if self.algorithm.rows:
                sent = self.messages[jobs.source].of(round)
                made = [replace(reply, message=sent) for reply in made]
            replies += made
        return Collected(in_order(replies, jobs) if self.algorithm.uploads == "each" else replies, dropped, norms)

    def forget(self, source: str, numbers: Iterable[int]) -> None:
        """Nobody waits for the answers to these jobs any longer."""
        for number in numbers:
            self._ids.pop((source, number), None)

    def _common_block(self, source: str, message: Message, payload: Mapping[str, Params]) -> bytes:
        """The common half of the letters of a round, packed once for all its clients."""
        round, block = self._common.get(source, (-1, b""))
        if round != message.round:
            header = {"kind": "train", "round": message.round, "seed": self.run.seed}
            block = wire.pack(header, {"payload": payload})
            self._common[source] = (message.round, block)
        return block

    def _needs(self, asked: bytes, answer: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
        told, trees = wire.unpack(answer, self.device)
        if "refused" in told:
            raise InputError(str(told["refused"]))
        self.wire_down += len(asked)
        self.wire_up += len(answer)
        self.frames_down += wire.overhead({})
        self.frames_up += wire.overhead(trees)
        return told, trees

    def _count_rows(self, rows: Mapping[str, Params], touched: Mapping[str, int]) -> None:
        """Counts the rows that are really looked up (a client that looks up none is sent one all the same)."""
        real = for_every_table(self.algorithm.rows.tables, touched)
        self.ledger.bytes_up += ID_BYTES * sum(touched.values())
        for leaves in rows.values():
            self.ledger.bytes_down += sum(tree.nbytes({t: x[: real[t]]}) for t, x in leaves.items())

    def _examples(self, source: str, client: int, message: Message, count: int) -> tuple[dict[str, Any], bool]:
        """A client's central examples; as they are stored where client and centre prepare theirs alike."""
        assert message.examples is not None
        central = self.run.central[message.examples.source]
        rows = drawn_for(source, client, self.run.seed, message.round, count, len(central))
        fields = {name: torch.from_numpy(np.take(x, rows, axis=0)) for name, x in central.arrays.items()}
        if central.prepare is self.run.data[source].prepare:
            return fields, False
        return (central.prepare(fields) if central.prepare else fields), True

    def _check_shapes(self, upload: Upload) -> None:
        """Refuses an update of a parameter that has not the parameter's shape."""
        for leaves in upload.values.values():
            for name, x in leaves.items():
                expected = self.algorithm.model.shapes.get(name, tuple(x.shape))
                if name in upload.rows:
                    expected = (len(upload.rows[name]), *expected[1:])
                if tuple(x.shape) != expected:
                    raise InputError(f"The update of '{name}' has the shape {list(x.shape)}, not {list(expected)}.")

    def _alike(self, source: str, uploads: dict[int, Upload]) -> dict[int, Upload]:
        """The uploads by client, without those that have other parts than most: they cannot be averaged with them."""
        layouts = {
            client: tuple(
                (part, name, x.shape[x.ndim > 0 and name in upload.rows :])
                for part, leaves in sorted(upload.values.items())
                for name, x in sorted(leaves.items())
            )
            for client, upload in uploads.items()
        }
        if len(set(layouts.values())) < 2:
            return uploads
        (usual, _), *_ = Counter(layouts.values()).most_common()
        for client, layout in layouts.items():
            if layout != usual:
                self.say(f"Client {client} of '{source}' is dropped: its update has other parts than those of others.")
        return {client: upload for client, upload in uploads.items() if layouts[client] == usual}


def evaluation(params: Params, question: Question) -> bytes:
    """The request of a federated evaluation, the same for every client."""
    return wire.pack({"kind": "evaluate", "on": question.on, "metrics": list(question.metrics)}, {"params": params})


def mean_of(answers: Iterable[bytes], question: Question) -> dict[str, float]:
    """The metrics over the examples of all clients, from the sums that each answered."""
    sums: dict[str, float] = {}
    for answer in answers:
        told, _ = wire.unpack(answer)
        if "refused" in told:
            raise InputError(str(told["refused"]))
        sums = {name: sums.get(name, 0.0) + value for name, value in told["sums"].items()}
    return {name: sums[name] / sums["examples"] for name in question.metrics}


@contextmanager
def _understood() -> Iterator[None]:
    """Turns what an answer lacks into one sentence."""
    try:
        yield
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        raise InputError("The answer is not one to a request for an update.") from error
