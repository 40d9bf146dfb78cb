"""The simulator: clients in one process, cohorts as units of work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mixfed import rows, tree
from mixfed.backends.executors import WHOLE, Execution, Part, Pool, Tally, execute, keep_freed_memory
from mixfed.backends.remembered import Remembered
from mixfed.backends.sent import Parts, Sent, restored, saved
from mixfed.batches import Batches, Plan, plan_cohort
from mixfed.core import Algorithm, Message, Reply
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.flight import Arrivals
from mixfed.measure.ledger import Ledger, count_flops
from mixfed.places import Place, check_place
from mixfed.private import PrivateStore
from mixfed.row_check import check_lookups

EXECUTORS = ("auto", "loop", "vmap")
_CACHE = 8 << 20
_AT_ONCE = 64


class Simulator:
    """Runs the clients of an algorithm in this process.

    ``executor`` is loop, vmap, or auto: time both on clients of the first cohort (that is not much smaller than what
    was asked) and keep the faster, but run a cohort of one client by loop. The choice is remembered on this machine (in
    the user's cache folder), because another executor rounds differently and a run is to be repeatable bit for bit.
    ``chunk`` fixes the clients per vmapped chunk, ``memory`` (bytes) bounds what the clients being run at one time may
    take, together with the messages to clients in flight; ``in_flight`` is where these are kept from the next round on.
    """

    def __init__(
        self,
        executor: str = "auto",
        *,
        threads: int | None = None,
        chunk: int | None = None,
        memory: int = 2 << 30,
        in_flight: Place = "device",
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        if executor not in EXECUTORS:
            raise InputError(f"There is no executor '{executor}'; choose one of {', '.join(EXECUTORS)}.")
        if (chunk is not None and chunk < 1) or (threads is not None and threads < 1) or memory < 1:
            raise InputError("Threads, chunk and memory of the simulator must be at least 1.")
        check_place(in_flight, "Messages in flight")
        self.executor = executor
        self.threads = threads or torch.get_num_threads()
        self.memory = memory
        self.in_flight = in_flight
        self._budget = memory
        self.say = say
        self._chunk = chunk
        self._pool = Pool(self.threads)
        self._chosen: dict[str, Execution] = {}
        self._asked: dict[str, int] = {}
        self._alone: set[str] = set()
        self._checked: set[str] = set()
        self._sent: dict[str, dict[int, Sent]] = {}
        self.dropped: list[tuple[str, int]] = []
        keep_freed_memory()

    def start(
        self,
        algorithm: Algorithm,
        data: Mapping[str, FederatedData],
        central: Mapping[str, CentralData],
        privates: PrivateStore,
        seed: int,
        ledger: Ledger,
    ) -> None:
        """Takes up a run."""
        self.algorithm, self.data, self.central = algorithm, data, central
        self.privates, self.seed, self.ledger = privates, seed, ledger
        for source in algorithm.batching:
            rows.check_fields(algorithm.rows, data[source], source)
        self._chosen.clear()
        self._asked.clear()
        self._alone.clear()
        self._checked.clear()
        self._sent.clear()
        self.dropped.clear()

    def state(self) -> dict[str, Any]:
        """The executions chosen so far (another one rounds differently), and the messages of jobs in flight."""
        return {
            "executions": {source: asdict(how) for source, how in self._chosen.items()},
            "asked": dict(self._asked),
            "sent": {source: saved(by_round) for source, by_round in self._sent.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up the executions and the messages of the run that is resumed."""
        self._chosen = {source: Execution(**how) for source, how in state["executions"].items()}
        self._asked = {source: int(count) for source, count in state["asked"].items()}
        device = self.algorithm.model.device if self.in_flight == "device" else torch.device("cpu")
        self._sent = {source: restored(kept, device) for source, kept in state["sent"].items()}

    def submit(self, source: str, clients: NDArray[np.int64], message: Message, version: int) -> None:
        """Sends a message to clients; they train when they are collected, and until then the message is kept."""
        alike = rows.shared(self.algorithm.rows, message.payload)
        self.ledger.bytes_down += tree.nbytes(alike) * len(clients)
        if message.examples:
            self.ledger.bytes_down += self._plan(source, clients, message, version).bytes_of_extra()
        for part, leaves in (message.first or {}).items():
            self.ledger.bytes_down += tree.nbytes(leaves) * self.privates.lacking(source, part, clients)
        self._asked[source] = max(len(clients), self._asked.get(source, 0))
        sent = self._sent.setdefault(source, {})
        if version in sent:
            sent[version] = replace(sent[version], clients=np.concatenate([sent[version].clients, clients]))
        else:
            last = sent[max(sent)].parts if sent else None
            same = last is not None and last.are_those_of(message)
            parts = last if last is not None and same else Parts(message.payload, message.first or {})
            for earlier in sent.values():
                earlier.parts.keep_at(self.in_flight)
            sent[version] = Sent(replace(message, payload={}, first=None), parts, clients)
        self._budget = self._left()
        if self._budget < 0:
            raise InputError(
                f"The messages to clients in flight take more than the {self.memory:,} bytes that the simulator may"
                " use; raise simulator.memory, or keep them elsewhere with simulator.in_flight."
            )

    def collect(self, version: int, arrivals: Arrivals | None = None) -> list[Reply]:
        """The replies of these arrivals (left out: of all clients that were sent something, round by round).

        Clients that were sent the same message run as one cohort, the cohorts side by side; of an ageless algorithm all
        of them are one cohort. Uploads that are wanted one by one come in the order of arrival.
        """
        if arrivals is None:
            everyone = [
                Arrivals(source, sent.clients, *[np.full_like(sent.clients, number)] * 2)
                for source, versions in self._sent.items()
                for number, sent in versions.items()
            ]
            return [reply for jobs in everyone for reply in self.collect(version, jobs)]
        groups = arrivals.by_round()
        counted = [self._sent[jobs.source][number].counted for number, jobs in groups]
        parts = self._parts(groups)
        tallies = execute(self.algorithm, parts, self.privates, self._pool) if parts else []
        for part in parts:
            self._count_work(part.plan, part.messages[0])
        done = [
            pair for part, found in zip(parts, tallies, strict=True) for pair in zip(part.messages, found, strict=True)
        ]
        replies: list[Reply] = []
        for (_, jobs), (message, tally), already in zip(groups, done, counted, strict=True):
            self._count(tally, jobs.source)
            if not already:
                self._count_rows(tally.row_bytes_down, tally.id_bytes)
            found = _replies(tally, jobs.source, version - int(jobs.versions[0]))
            replies += [replace(r, message=message) for r in found] if self.algorithm.rows else found
        if self.algorithm.uploads == "each":
            place = {client: i for i, client in enumerate(arrivals.clients.tolist())}
            replies.sort(key=lambda reply: place[reply.clients[0]])
        return replies

    def _parts(self, groups: list[tuple[int, Arrivals]]) -> list[Part]:
        """A cohort for the clients of each round, or one for all where clients of several rounds can run at once."""
        messages = [self._take(jobs, number) for number, jobs in groups]
        members = [np.sort(jobs.clients) for _, jobs in groups]
        at_once = self.algorithm.ageless and not self.algorithm.rows and len(groups) > 1
        if not at_once or any(message.examples or message.first for message in messages):
            plans = [
                self._plan(jobs.source, clients, message, number)
                for (number, jobs), clients, message in zip(groups, members, messages, strict=True)
            ]
            for message, plan in zip(messages, plans, strict=True):
                self._check_lookups(message, plan)
            return [Part.alike(m, plan, self._how(m, plan)) for m, plan in zip(messages, plans, strict=True)]
        which = np.repeat(np.arange(len(groups)), [len(clients) for clients in members])
        rounds = np.array([number for number, _ in groups], np.int64)[which]
        whole = self._plan(groups[0][1].source, np.concatenate(members), messages[0], rounds)
        return [Part(messages, which, whole, self._how(messages[0], whole))]

    def _check_lookups(self, message: Message, plan: Plan) -> None:
        new = self.algorithm.rows and plan.source not in self._checked
        if new and check_lookups(self.algorithm, message, plan, self.privates):
            self._checked.add(plan.source)

    def discard(self, arrivals: Arrivals, *, reported: bool) -> None:
        """Forgets these jobs. Clients that report in vain have trained, which counts, and keep what is theirs; what
        they send up is refused."""
        for number, jobs in arrivals.by_round():
            counted = self._sent[jobs.source][number].counted
            message = self._take(jobs, number)
            if not counted:
                self._count_picked(jobs.source, jobs.clients, message, number)
            if not reported:
                continue
            plan = self._plan(jobs.source, np.sort(jobs.clients), message, number)
            if message.first or self.privates.keeps_something():
                part = Part.alike(message, plan, self._how(message, plan))
                self._keep(execute(self.algorithm, [part], self.privates, self._pool)[0][0], jobs.source)
            self._count_work(plan, message)

    def end_round(self) -> None:
        """Counts the rows that went to clients still on their way; those of the others are known from their work."""
        for source, by_round in self._sent.items() if self.algorithm.rows else ():
            for number, sent in by_round.items():
                if not sent.counted:
                    self._count_picked(source, sent.clients, sent.whole(self.algorithm.model.device), number)
                    by_round[number] = replace(sent, counted=True)

    def _take(self, jobs: Arrivals, number: int) -> Message:
        """The message of jobs that are in flight no longer; it is let go with the last of them."""
        sent = self._sent[jobs.source]
        message = sent[number].whole(self.algorithm.model.device)
        left = np.setdiff1d(sent[number].clients, jobs.clients)
        if len(left):
            sent[number] = replace(sent[number], clients=left)
        else:
            del sent[number]
        return message

    def _left(self) -> int:
        """What the memory budget leaves beside the messages of earlier rounds, without the last one, which is the model
        as the server has it."""
        device = self.algorithm.model.device
        if self.in_flight == "disk" or (self.in_flight == "memory" and device.type != "cpu"):
            return self.memory
        left = self.memory
        for by_round in self._sent.values():
            last = by_round[max(by_round)].parts if by_round else None
            earlier = {id(sent.parts): sent.parts for sent in by_round.values() if sent.parts is not last}
            left -= sum(tree.nbytes(parts.tree()) for parts in earlier.values())
        return left

    def _plan(
        self, source: str, clients: NDArray[np.int64], message: Message, version: int | NDArray[np.int64]
    ) -> Plan:
        sample = message.examples
        if sample and sample.source not in self.central:
            raise InputError(f"Example transfer sends central data '{sample.source}', and the run was given none.")
        central = self.central[sample.source] if sample else None
        batching = self.algorithm.batching[source]
        return plan_cohort(source, self.data[source], clients, batching, self.seed, version, sample, central)

    def _count(self, tally: Tally, source: str) -> None:
        self._keep(tally, source)
        self.dropped += [(source, client) for client in tally.dropped]
        self.ledger.bytes_up += tally.upload_bytes

    def _keep(self, tally: Tally, source: str) -> None:
        for clients, private in tally.private:
            self.privates.put_all(source, clients, private)

    def _count_rows(self, bytes_down: int, id_bytes: int) -> None:
        self.ledger.bytes_down += bytes_down
        self.ledger.bytes_up += id_bytes

    def _count_picked(self, source: str, clients: NDArray[np.int64], message: Message, number: int) -> None:
        """Counts the rows that clients asked for and were sent, whatever became of them."""
        if not self.algorithm.rows:
            return
        plan = self._plan(source, np.sort(clients), message, number)
        for i in range(0, len(plan), _AT_ONCE):
            few = slice(i, min(i + _AT_ONCE, len(plan)))
            batches = plan.chunk(few, self.algorithm.model.device)
            picked = rows.pick(self.algorithm.rows, message.payload, batches, plan.clients[few].tolist())
            self._count_rows(picked.bytes_down, picked.bytes_of_ids)

    def _count_work(self, plan: Plan, message: Message) -> None:
        def measure(examples: int) -> int:
            batches: Batches = plan.client(0, self.algorithm.model.device).first(examples)
            private = self.privates.get(plan.source, int(plan.clients[0]), message.first)
            received = message
            if self.algorithm.rows:
                picked = rows.pick(self.algorithm.rows, message.payload, batches, [int(plan.clients[0])])
                received, batches = picked.given(message), picked.batches
            return count_flops(lambda: self.algorithm.client(received, private, batches))

        steps, examples = int(plan.steps.sum()), int(plan.examples.sum())
        self.ledger.count_clients(("clients", plan.source), measure, steps, examples)

    def _how(self, message: Message, plan: Plan) -> Execution:
        new = plan.source not in self._chosen
        few = len(plan) == 1 or (new and 4 * len(plan) < 3 * self._asked.get(plan.source, 0))
        if self.executor == "auto" and few:  # later cohorts may be larger, so nothing is chosen yet
            loop = Execution("loop", 0, self.threads)
            if new and plan.source not in self._alone:
                self.say(f"Executor: {loop}; {len(plan)} of a cohort are too few to batch.")
            self._alone.add(plan.source)
            return loop
        if plan.source not in self._chosen:
            self._chosen[plan.source] = self._choose(message, plan)
        how = self._chosen[plan.source]
        if not how.chunk:
            return how
        why_not = self._vmap_cannot(plan)  # this cohort may be ragged where the first one was not
        if why_not and self.executor == "vmap":
            raise InputError(f"The vmap executor cannot run this model: {why_not}; choose loop.")
        if why_not:
            return Execution("loop", 0, self.threads)
        return replace(how, chunk=self._chunk_size(plan, how.chunk))

    def _choose(self, message: Message, plan: Plan) -> Execution:
        loop = Execution("loop", 0, self.threads)
        limits = {self._chunk_size(plan, limit): limit for limit in (self._chunk_limit(plan), WHOLE)}
        vmaps = [Execution("vmap", limit, self.threads) for _, limit in sorted(limits.items(), reverse=True)]
        why_not = self._vmap_cannot(plan)
        if self.executor != "auto":
            return vmaps[0] if self.executor == "vmap" else loop
        if why_not:
            self.say(f"Executor: {loop}; {why_not}.")
            return loop
        remembered = Remembered(self._signature(message, plan))
        known = remembered.load()
        # One unit after another, with all cores inside each operator, beats the pool where operators are large.
        candidates = list(dict.fromkeys([loop, *vmaps, *(replace(how, threads=1) for how in (loop, *vmaps))]))
        for how in candidates:
            if known == str(how):
                self.say(f"Executor: {how}, as timed earlier on this machine.")
                return how
        return self._timed(message, plan, candidates, remembered)

    def _timed(self, message: Message, plan: Plan, candidates: list[Execution], remembered: Remembered) -> Execution:
        """Runs some clients of the cohort under each candidate, throws the results away, and keeps the fastest."""
        sized = {how: replace(how, chunk=how.chunk and self._chunk_size(plan, how.chunk)) for how in candidates}
        few = plan.first_clients(2 * self.threads * max(how.chunk for how in sized.values()))
        seconds: dict[Execution, float] = {}
        for how in candidates:
            try:
                execute(
                    self.algorithm, [Part.alike(message, few.first_clients(2), sized[how])], self.privates, self._pool
                )
            except InputError as error:
                if how.name == "loop":
                    raise
                if any(tried.name == "vmap" for tried in candidates[: candidates.index(how)]):
                    continue  # said before
                self.say(f"Executor: vmap cannot run this model ({str(error.__cause__ or error).splitlines()[0]}).")
                continue
            took = []
            for _ in range(3):
                start = time.perf_counter()
                execute(self.algorithm, [Part.alike(message, few, sized[how])], self.privates, self._pool)
                took.append(time.perf_counter() - start)
            seconds[how] = min(took)
        best = min(seconds, key=lambda how: seconds[how])
        timings = ", ".join(f"{1000 * s / len(few):.2f} ms by {how}" for how, s in seconds.items())
        self.say(f"Executor: {best}; a client takes {timings}.")
        remembered.save(str(best))
        return best

    def _chunk_size(self, plan: Plan, limit: int) -> int:
        """A thread's share of the cohort, within the limit and the memory budget."""
        share = -(-len(plan) // self.threads) if self._chunk is None else min(self._chunk, len(plan))
        return int(max(1, min(share, limit, self._budget // (self._client_bytes(plan) * self.threads))))

    def _chunk_limit(self, plan: Plan) -> int:
        """As many clients as fit the cache."""
        return max(1, _CACHE // self._client_bytes(plan)) if self._chunk is None else WHOLE

    def _client_bytes(self, plan: Plan) -> int:
        model = self.algorithm.model
        slots = rows.slots(self.algorithm.rows, plan)
        sizes = [(min(s[0], slots.get(n, s[0])), *s[1:]) if s else s for n, s in model.shapes.items()]
        weights = 4 * sum(int(np.prod(size)) for size in sizes)
        return 3 * weights + 4 * plan.bytes_per_client() + 1

    def _vmap_cannot(self, plan: Plan) -> str | None:
        full = plan.rows.shape[2]
        if self.algorithm.model.has_batch_norm and bool(((plan.counts > 0) & (plan.counts < full)).any()):
            return "BatchNorm would take the padding of ragged batches for examples"
        return None

    def _signature(self, message: Message, plan: Plan) -> str:
        shapes = [(n, list(x.shape), str(x.dtype)) for n, x in tree.flatten(message.payload).items()]
        fields = [(n, list(a.shape[1:])) for n, a in self.data[plan.source].arrays.items()]
        work = [
            self.algorithm.name,
            list(self.algorithm.rows),
            shapes,
            fields,
            list(plan.rows.shape),
            self.threads,
            self._chunk,
            torch.__version__,
        ]
        return blake2b(json.dumps(work).encode(), digest_size=12).hexdigest()


def _replies(tally: Tally, source: str, staleness: int) -> list[Reply]:
    if tally.uploads:
        return [
            Reply(upload.values, float(upload.weight), (client,), source, staleness, upload.rows, _ones(upload.rows))
            for client, upload in sorted(tally.uploads, key=lambda item: item[0])
        ]
    if not tally.used:
        return []
    total = {k: tree.scale(v, 1.0 / tally.weight) for k, v in (tally.total or {}).items()}
    ids: dict[str, torch.Tensor] = {}
    touched: dict[str, torch.Tensor] = {}
    if tally.row_sum is not None:
        ids, weights, sums = tally.row_sum.result()
        touched = tree.scale(weights, 1.0 / tally.weight)
        for part, tables in sums.items():
            total[part] = total.get(part, {}) | {t: x.mul_(1.0 / tally.weight) for t, x in tables.items()}
    return [Reply(total, tally.weight, tuple(tally.used), source, staleness, ids, touched)]


def _ones(ids: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {table: torch.ones(len(i), device=i.device) for table, i in ids.items()}
