"""How a cohort is run: by loop, vmap or in factors, in how many threads, in chunks of how many clients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mixfed.backends.simulator import cores
from mixfed.backends.simulator.executors import REUSED, WHOLE, Cohort, Execution, Pool, execute
from mixfed.backends.simulator.factored import pays
from mixfed.backends.work import client_work
from mixfed.core.algorithm import Algorithm, Message
from mixfed.core.batches import Plan
from mixfed.core.ledger import Cost, Ledger, count_work
from mixfed.core.private import PrivateStore
from mixfed.data.store import FederatedData
from mixfed.errors import InputError, explained
from mixfed.models import vmap
from mixfed.transforms.rows import select as rows

EXECUTORS = ("auto", "loop", "vmap", "factored")
_CACHE = 8 << 20


class Chooser:
    """Chooses an execution for the cohorts of each source.

    ``executor`` is loop, vmap, factored, or auto: time all on clients of the first cohort (that is not much smaller
    than what was asked) and keep the fastest, but run a cohort of one client by loop. Another execution rounds
    differently, so that a run is repeated bit for bit only with the same ones: ``chosen`` are those of an earlier run,
    by source.

    How many ``threads``, if they are not given, and how many cores in each operator, follows from what the work is
    worth (see :mod:`mixfed.backends.simulator.cores`); auto times one thread and all. ``memory`` is what the clients at
    work may take, which may change from cohort to cohort.
    """

    def __init__(
        self,
        executor: str,
        threads: int | None,
        chunk: int | None,
        memory: int,
        say: Callable[[str], None],
        chosen: Mapping[str, str],
        chose: Callable[[str, str], None] = lambda source, execution: None,
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
        self._chose = chose
        self._before = {source: Execution.parsed(text) for source, text in chosen.items()}
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
            "executions": self.chosen(),
            "asked": dict(self._asked),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up the choices of the run that is resumed."""
        self._chosen = {source: Execution.parsed(text) for source, text in state["executions"].items()}
        self._asked = {source: int(count) for source, count in state["asked"].items()}

    def chosen(self) -> dict[str, str]:
        """The executions that auto has chosen so far, by source, as text."""
        return {source: how.text() for source, how in self._chosen.items()}

    def is_open(self, source: str, clients: int) -> bool:
        """Whether auto has still to choose for this source, and a cohort of so many clients tells enough to do so."""
        tells = clients > 1 and 4 * clients >= 3 * self._asked.get(source, 0)
        return self.executor == "auto" and source not in self._chosen and tells

    def choose(self, message: Message, plan: Plan) -> str:
        """What auto chooses by this cohort, as text for :meth:`adopt`."""
        return self._choose(message, plan).text()

    def adopt(self, source: str, execution: str) -> None:
        """Runs the cohorts of a source in this way from now on."""
        self._chosen[source] = Execution.parsed(execution)
        self._chose(source, execution)

    def asked(self, source: str, clients: int) -> None:
        """Hears of a cohort that was asked, of which fewer may report at once."""
        self._asked[source] = max(clients, self._asked.get(source, 0))

    def cost(self, plan: Plan, message: Message) -> Cost:
        """What a client's step costs, measured on the first client of the first cohort."""

        def measure(examples: int) -> tuple[int, int]:
            first = int(plan.clients[0])
            batches = plan.client(0, self.algorithm.model.device).first(examples)
            private = self.privates.get(plan.source, first, message.first)
            tables = self.algorithm.rows.tables
            picked = rows.pick(tables, message.payload, batches, [first]) if tables else None
            return count_work(lambda: client_work(self.algorithm, message, private, batches, picked))

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
        """The execution that was chosen for this source, or is chosen now.

        A single client runs by loop. So do a few clients of a large cohort, as long as nothing is chosen: the choice
        waits for a cohort that tells more.
        """
        new, loop = plan.source not in self._chosen, self._with_threads("loop", message, plan)
        if len(plan) == 1 or (new and 4 * len(plan) < 3 * self._asked.get(plan.source, 0)):
            if new and plan.source not in self._alone:
                self.say(f"Executor: {loop}; {len(plan)} of a cohort are too few to batch.")
            self._alone.add(plan.source)
            return loop
        if new:
            self.adopt(plan.source, self.choose(message, plan))
        return self._chosen[plan.source]

    def _choose(self, message: Message, plan: Plan) -> Execution:
        """The execution of an earlier run if there is one, else the fastest now."""
        if plan.source in self._before:
            before = self._before[plan.source]
            self.say(f"Executor: {before}, as in the run that is repeated.")
            return before
        why_not = self._vmap_cannot(plan)
        if why_not:
            loop = self._with_threads("loop", message, plan)
            self.say(f"Executor: {loop}; {why_not}.")
            return loop
        return self._timed(message, plan, self._candidates(message, plan))

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
        moving = self.algorithm.model.numbers(without=self.algorithm.rows.tables)
        return cores.worth(product * clients, moving * clients, self.threads)

    def _candidates(self, message: Message, plan: Plan) -> list[Execution]:
        """What is timed: loop, vmap and, where it may pay, factors, in all threads, and, if no number of threads was
        given, in one."""
        found = []
        names = ("loop", "vmap", "factored") if self._factored(plan) else ("loop", "vmap")
        for threads in dict.fromkeys([self.threads, self.threads if self._given_threads else 1]):
            for name in names:
                limits = (self._chunk_limit(plan, name), WHOLE) if name != "loop" else (0,)
                sizes = {limit and self._chunk_size(plan, limit, threads, name): limit for limit in limits}
                for chunk in sorted(sizes.values(), reverse=True):
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
                    self.algorithm, [Cohort.alike(message, few.first_clients(2), sized[how])], self.privates, self.pool
                )
            except InputError as error:
                if how.name == "loop":
                    raise
                if any(tried.name == how.name for tried in candidates[: candidates.index(how)]):
                    continue  # said before
                why = str(error.__cause__ or error).splitlines()[0]
                self.say(f"Executor: {how.name} cannot run this model ({why}).")
                continue
            took = []
            for _ in range(3):
                start = time.perf_counter()
                execute(self.algorithm, [Cohort.alike(message, few, sized[how])], self.privates, self.pool)
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
        slots, shapes = rows.slots(self.algorithm.rows.tables, plan), self.algorithm.model.shapes
        sizes = {n: math.prod((min(s[0], slots.get(n, s[0])), *s[1:]) if s else s) for n, s in shapes.items()}
        if name == "factored":
            sizes |= {n: _rank(plan) * sum(shapes[n]) for n in self._factored(plan)}
        return list(sizes.values())

    def _factored(self, plan: Plan) -> list[str]:
        """The weights that may stay in factors. Rows of tables have a way of their own."""
        model = self.algorithm.model
        return [n for n in model.trainable if not self.algorithm.rows and pays(model.shapes[n], _rank(plan))]

    def _vmap_cannot(self, plan: Plan) -> str | None:
        if vmap.MISSING:
            return vmap.MISSING
        full = plan.rows.shape[2]
        if self.algorithm.model.has_batch_norm and bool(((plan.counts > 0) & (plan.counts < full)).any()):
            return "BatchNorm would take the padding of ragged batches for examples"
        return None


def _rank(plan: Plan) -> int:
    """How many examples a client has in a round, at most."""
    return int(np.prod(plan.rows.shape[1:]))
