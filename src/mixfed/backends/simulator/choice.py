"""How a cohort is run: by loop, vmap or in factors, in how many threads, in chunks of how many clients."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from mixfed.backends.simulator import cores
from mixfed.backends.simulator.executors import REUSED, WHOLE, Execution, Part, Pool, execute
from mixfed.backends.simulator.factored import pays
from mixfed.backends.simulator.remembered import Remembered
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message
from mixfed.core.batches import Batches, Plan
from mixfed.core.ledger import Cost, Ledger, count_work
from mixfed.core.private import PrivateStore
from mixfed.data.store import FederatedData
from mixfed.errors import InputError, explained
from mixfed.transforms.rows import select as rows

EXECUTORS = ("auto", "loop", "vmap", "factored")
_CACHE = 8 << 20


class Chooser:
    """Chooses an execution for the cohorts of each source.

    ``executor`` is loop, vmap, factored, or auto: time all on clients of the first cohort (that is not much smaller
    than what was asked) and keep the fastest, but run a cohort of one client by loop. The choice is remembered on this
    machine (in the user's cache folder), because another executor rounds differently and a run is to be repeatable bit
    for bit.

    How many ``threads``, if they are not given, and how many cores in each operator, follows from what the work is
    worth (see :mod:`mixfed.backends.simulator.cores`); auto times one thread and all. ``memory`` is what the clients at
    work may take, which may change from cohort to cohort.
    """

    def __init__(
        self, executor: str, threads: int | None, chunk: int | None, memory: int, say: Callable[[str], None]
    ) -> None:
        if executor not in EXECUTORS:
            raise InputError(f"There is no executor '{executor}'; choose one of {', '.join(EXECUTORS)}.")
        if (chunk is not None and chunk < 1) or (threads is not None and threads < 1) or memory < 1:
            raise InputError("Threads, chunk and memory of the simulator must be at least 1.")
        self.executor, self.memory, self.say = executor, memory, say
        self.threads = threads or torch.get_num_threads()
        self.pool = Pool(self.threads)
        self._given_threads = threads is not None
        self._chunk = chunk
        self._chosen: dict[str, Execution] = {}
        self._asked: dict[str, int] = {}
        self._alone: set[str] = set()

    def start(
        self, algorithm: Algorithm, data: Mapping[str, FederatedData], privates: PrivateStore, ledger: Ledger
    ) -> None:
        """Takes up a run."""
        self.algorithm, self.data, self.privates, self.ledger = algorithm, data, privates, ledger
        self._chosen.clear()
        self._asked.clear()
        self._alone.clear()

    def state(self) -> dict[str, Any]:
        """The executions chosen so far, and the most clients of a source that were asked at once."""
        return {
            "executions": {source: asdict(how) for source, how in self._chosen.items()},
            "asked": dict(self._asked),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up the choices of the run that is resumed."""
        self._chosen = {source: Execution(**how) for source, how in state["executions"].items()}
        self._asked = {source: int(count) for source, count in state["asked"].items()}

    def asked(self, source: str, clients: int) -> None:
        """Hears of a cohort that was asked, of which fewer may report at once."""
        self._asked[source] = max(clients, self._asked.get(source, 0))

    def cost(self, plan: Plan, message: Message) -> Cost:
        """What a client's step costs, measured on the first client of the first cohort."""

        def measure(examples: int) -> tuple[int, int]:
            batches: Batches = plan.client(0, self.algorithm.model.device).first(examples)
            private = self.privates.get(plan.source, int(plan.clients[0]), message.first)
            received = message
            if self.algorithm.rows:
                picked = rows.pick(self.algorithm.rows, message.payload, batches, [int(plan.clients[0])])
                received, batches = picked.given(message), picked.batches
            return count_work(lambda: self.algorithm.client(received, private, batches))

        with explained(f"Client {int(plan.clients[0])} of '{plan.source}' cannot train"):
            return self.ledger.cost(("clients", plan.source), measure)

    def how(self, message: Message, plan: Plan) -> Execution:
        """How to run this cohort."""
        why_not = self._vmap_cannot(plan)
        if self.executor in ("vmap", "factored") and why_not:
            raise InputError(f"The {self.executor} executor cannot run this model: {why_not}; choose loop.")
        how = self._with_threads(self.executor, message, plan) if self.executor != "auto" else self._auto(message, plan)
        if how.chunk and why_not:  # the first cohort, for which vmap was chosen, was not ragged
            how = self._with_threads("loop", message, plan)
        return self._sized(how, plan)

    def _auto(self, message: Message, plan: Plan) -> Execution:
        """What was chosen, or is now; few of a cohort run by loop, and as later ones may be more, nothing is chosen."""
        new, loop = plan.source not in self._chosen, self._with_threads("loop", message, plan)
        if len(plan) == 1 or (new and 4 * len(plan) < 3 * self._asked.get(plan.source, 0)):
            if new and plan.source not in self._alone:
                self.say(f"Executor: {loop}; {len(plan)} of a cohort are too few to batch.")
            self._alone.add(plan.source)
            return loop
        if new:
            why_not = self._vmap_cannot(plan)
            self._chosen[plan.source] = loop if why_not else self._fastest(message, plan)
            if why_not:
                self.say(f"Executor: {loop}; {why_not}.")
        return self._chosen[plan.source]

    def _fastest(self, message: Message, plan: Plan) -> Execution:
        """The candidate that was the fastest on this machine before, or is now."""
        remembered = Remembered(self._signature(message, plan))
        known = remembered.load()
        candidates = self._candidates(message, plan)
        for how in candidates:
            if known == str(how):
                self.say(f"Executor: {how}, as timed earlier on this machine.")
                return how
        best = self._timed(message, plan, candidates)
        remembered.save(str(best))
        return best

    def _with_threads(self, name: str, message: Message, plan: Plan) -> Execution:
        """An execution with the threads that were given. Else a cohort under vmap is one thread's, with as many cores
        in an operator as it is worth, and a loop has as many threads as a client in each is worth."""
        chunk = 0 if name == "loop" else WHOLE
        if self._given_threads:
            return Execution(name, chunk, self.threads, self.threads)
        worth = self._worth(message, plan, len(plan) if chunk else self.threads)
        return Execution(name, chunk, 1 if chunk else worth, worth)

    def _worth(self, message: Message, plan: Plan, clients: int) -> int:
        """How many cores the work of so many clients is worth. Of tables that came by rows next to nothing moves."""
        product = self.cost(plan, message).of_a_product(plan.rows.shape[2])
        moving = self.algorithm.model.numbers(without=self.algorithm.rows)
        return cores.worth(product * clients, moving * clients, self.threads)

    def _candidates(self, message: Message, plan: Plan) -> list[Execution]:
        """What is timed: loop and vmap in all threads, and, if no number of threads was given, in one."""
        found = []
        batched = ["vmap", "factored"] if self._factored(plan) else ["vmap"]
        for threads in dict.fromkeys([self.threads, self.threads if self._given_threads else 1]):
            for name in ("loop", *batched):
                limits = {0: 0}
                if name != "loop":
                    cache = self._chunk_limit(plan, name)
                    limits = {self._chunk_size(plan, limit, threads, name): limit for limit in (cache, WHOLE)}
                for chunk in sorted(limits.values(), reverse=True):
                    inside = self.threads if threads > 1 else self._worth(message, plan, len(plan) if chunk else 1)
                    found.append(Execution(name, chunk, threads, inside))
        return found

    def _timed(self, message: Message, plan: Plan, candidates: list[Execution]) -> Execution:
        """Runs some clients of the cohort under each candidate, throws the results away, and keeps the fastest."""
        sized = {how: self._sized(how, plan) for how in candidates}
        few = plan.first_clients(2 * self.threads * max(how.chunk for how in sized.values()))
        seconds: dict[Execution, float] = {}
        for how in candidates:
            try:
                execute(
                    self.algorithm, [Part.alike(message, few.first_clients(2), sized[how])], self.privates, self.pool
                )
            except InputError as error:
                if how.name == "loop":
                    raise
                if any(tried.name == how.name for tried in candidates[: candidates.index(how)]):
                    continue  # said before
                self.say(
                    f"Executor: {how.name} cannot run this model ({str(error.__cause__ or error).splitlines()[0]})."
                )
                continue
            took = []
            for _ in range(3):
                start = time.perf_counter()
                execute(self.algorithm, [Part.alike(message, few, sized[how])], self.privates, self.pool)
                took.append(time.perf_counter() - start)
            seconds[how] = min(took)
        best = min(seconds, key=lambda how: seconds[how])
        timings = ", ".join(f"{1000 * s / len(few):.2f} ms by {how}" for how, s in seconds.items())
        self.say(f"Executor: {best}; a client takes {timings}.")
        return best

    def _sized(self, how: Execution, plan: Plan) -> Execution:
        """The execution with chunks for this cohort."""
        return replace(how, chunk=how.chunk and self._chunk_size(plan, how.chunk, how.threads, how.name))

    def _chunk_size(self, plan: Plan, limit: int, threads: int, name: str) -> int:
        """As many clients as the limit and the memory allow, so that every thread has as many chunks, all alike."""
        limit = min(limit, self.memory // (self._client_bytes(plan, name) * threads))
        if self._chunk is not None:
            return max(1, min(self._chunk, limit, len(plan)))
        if self.algorithm.model.device.type == "cpu":
            limit = min(limit, REUSED // max(4 * max(self._leaf_sizes(plan, name), default=0), 1))
        rounds = -(-len(plan) // (max(limit, 1) * threads))
        return -(-len(plan) // (rounds * threads))

    def _chunk_limit(self, plan: Plan, name: str) -> int:
        """As many clients as fit the cache."""
        return max(1, _CACHE // self._client_bytes(plan, name)) if self._chunk is None else WHOLE

    def _client_bytes(self, plan: Plan, name: str) -> int:
        return 3 * 4 * sum(self._leaf_sizes(plan, name)) + 4 * plan.bytes_per_client() + 1

    def _leaf_sizes(self, plan: Plan, name: str) -> list[int]:
        """How many numbers each leaf of a client's model has, or its factors; a table that comes by rows, at most."""
        slots = rows.slots(self.algorithm.rows, plan)
        shapes = self.algorithm.model.shapes
        rank = int(np.prod(plan.rows.shape[1:]))
        sizes = {n: math.prod((min(s[0], slots.get(n, s[0])), *s[1:]) if s else s) for n, s in shapes.items()}
        if name == "factored":
            sizes |= {n: rank * sum(shapes[n]) for n in self._factored(plan)}
        return list(sizes.values())

    def _factored(self, plan: Plan) -> list[str]:
        """The weights that may stay in factors."""
        rank = int(np.prod(plan.rows.shape[1:]))
        model = self.algorithm.model
        return [n for n in model.trainable if n not in self.algorithm.rows and pays(model.shapes[n], rank)]

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
            self._given_threads,
            self._chunk,
            torch.__version__,
        ]
        return blake2b(json.dumps(work).encode(), digest_size=12).hexdigest()
