"""How a cohort is run: by loop, vmap or in factors, in how many threads, in chunks of how many clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from mixfed.backends.simulator import cores, promise
from mixfed.backends.simulator.chunks import Sizes
from mixfed.backends.simulator.execution import WHOLE, Execution, Record
from mixfed.backends.simulator.executors import Cohort, Pool, execute
from mixfed.backends.simulator.timing import AGAIN, Race, Trial, Watch
from mixfed.backends.work import client_work
from mixfed.core.algorithm import Message
from mixfed.core.backend import Run
from mixfed.core.batches import Plan
from mixfed.core.ledger import Cost, count_work
from mixfed.core.model import Model
from mixfed.core.private import PrivateStore
from mixfed.errors import InputError, explained
from mixfed.models import vmap
from mixfed.transforms.rows import select as rows

EXECUTORS = ("auto", "loop", "vmap", "factored")
LARGE = 1_000_000
"""Parameters from which on copies for many clients at once are likely to be slower than one client after another."""

SHARED_BY = 4
"""Factors pay where clients have a start in common. auto runs clients by vmap where so few, on average, share one."""

NOT_WORTH_IT = 1.1
"""An execution that takes no more than so many times as long as the fastest is not given up for it."""


def is_batched_well(model: Model) -> bool:
    """Whether clients of this model are likely to be faster many at once than one after another."""
    return not model.has_convolutions and model.numbers() < LARGE


class Chooser:
    """Chooses an execution for the cohorts of each source.

    ``executor`` is loop, vmap, factored, or auto: time them on clients of the first cohort (that is not much smaller
    than what was asked) and keep the fastest, but run a cohort of one client by loop. A run that is too short to time
    anything takes the most promising one. Where cohorts turn out to take much more or less time than was measured, the
    choice is made again. Another execution rounds differently, so that a run is repeated bit for bit only with the same
    ones: ``chosen`` are those of an earlier run, by source.

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
        self._before = {source: Record.parsed(text) for source, text in chosen.items()}
        self._chosen: dict[str, Record] = {}
        self._asked: dict[str, int] = {}
        self._round: dict[str, int] = {}
        self._told: set[str] = set()
        self._watched: dict[str, Watch] = {}
        self._known_sizes: dict[tuple[str, tuple[int, ...]], Sizes] = {}

    def start(self, run: Run, privates: PrivateStore, *, alone: bool = True) -> None:
        """Takes up a run. Only a process that is ``alone`` may choose again: members of a team stay alike."""
        self.algorithm, self.ledger, self.privates = run.algorithm, run.ledger, privates
        self._rounds, self._may_change = run.rounds, alone
        for kept in (self._chosen, self._asked, self._round, self._told, self._watched, self._known_sizes):
            kept.clear()

    def state(self) -> dict[str, Any]:
        """The executions chosen so far, the most clients of a source that were asked at once, and the last round in
        which any was."""
        return {"executions": self.chosen(), "asked": dict(self._asked), "rounds": dict(self._round)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up the choices of the run that is resumed.

        What was chosen for rounds after the checkpoint, before the run was killed, is in the executions that were
        given, and holds again.
        """
        self._chosen = {source: Record.parsed(text) for source, text in state["executions"].items()} | self._before
        self._asked = {source: int(count) for source, count in state["asked"].items()}
        self._round = {source: int(round) for source, round in state["rounds"].items()}
        self._watched = {source: Watch() for source in self._chosen if self._may_change}

    def chosen(self) -> dict[str, str]:
        """The executions that auto has chosen so far, by source, as text."""
        return {source: record.text() for source, record in self._chosen.items()}

    def is_open(self, source: str, clients: int) -> bool:
        """Whether auto has still to choose for this source, and a cohort of so many clients tells enough to do so."""
        tells = clients > 1 and 4 * clients >= 3 * self._asked.get(source, 0)
        return self.executor == "auto" and source not in self._chosen and tells

    def choose(self, message: Message, plan: Plan) -> str:
        """What auto chooses by this cohort, as text for :meth:`adopt`."""
        return self._choose(message, plan).text()

    def adopt(self, source: str, execution: str) -> None:
        """Runs the cohorts of a source in this way from now on."""
        self._chosen[source] = Record.parsed(execution)
        self._chose(source, execution)

    def asked(self, source: str, clients: int, round: int) -> None:
        """Hears of a cohort that was asked in a round, of which fewer may report at once."""
        self._asked[source] = max(clients, self._asked.get(source, 0))
        self._round[source] = round

    def took(self, cohort: Cohort, seconds: float) -> None:
        """Hears how long a cohort took, which may be a surprise."""
        watch = self._watched.get(cohort.plan.source)
        usual = 4 * len(cohort.plan) >= 3 * self._asked.get(cohort.plan.source, 0)
        if watch is not None and usual and cohort.how.name == self._now(cohort.plan.source).name:
            watch.saw(seconds / int(cohort.plan.steps.sum()))

    def _now(self, source: str) -> Execution:
        return self._chosen[source].at(self._round.get(source, 0))

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

    def how(self, message: Message, plan: Plan, messages: int = 1) -> Execution:
        """How to run this cohort, whose clients were sent so many different messages."""
        why_not = self._vmap_cannot(plan)
        if self.executor in ("vmap", "factored") and why_not:
            raise InputError(f"The {self.executor} executor cannot run this model: {why_not}; choose loop.")
        if self.executor == "factored" and plan.source not in self._told and not self._sizes(plan).factored:
            self._told.add(plan.source)
            self.say("Executor: factored runs these clients as vmap does: no weight is large beside their examples.")
        how = self._with_threads(self.executor, message, plan) if self.executor != "auto" else self._auto(message, plan)
        if how.chunk and why_not:  # the first cohort, for which vmap was chosen, was not ragged
            how = self._with_threads("loop", message, plan)
        if how.name == "factored" and self.executor == "auto" and len(plan) < SHARED_BY * messages:
            how = self._with_threads("vmap", message, plan)
        return self._sized(how, plan)

    def _auto(self, message: Message, plan: Plan) -> Execution:
        """The execution that was chosen for this source, or is chosen now.

        A single client runs by loop. So do a few clients of a large cohort, as long as nothing is chosen: the choice
        waits for a cohort that tells more.
        """
        new = plan.source not in self._chosen
        if len(plan) == 1 or (new and 4 * len(plan) < 3 * self._asked.get(plan.source, 0)):
            loop = self._with_threads("loop", message, plan)
            if new and plan.source not in self._told:
                self.say(f"Executor: {loop}; {len(plan)} of a cohort are too few to batch.")
            self._told.add(plan.source)
            return loop
        if new:
            self.adopt(plan.source, self.choose(message, plan))
        elif self._is_to_choose_again(plan.source):
            self._choose_again(message, plan)
        return self._now(plan.source)

    def _choose(self, message: Message, plan: Plan) -> Record:
        """The executions of an earlier run if there are any, else the fastest one now."""
        if plan.source in self._before:
            before = self._before[plan.source]
            self.say(f"Executor: {before.first}, as in the run that is repeated.")
            return before
        why_not = self._vmap_cannot(plan)
        if why_not:
            loop = self._with_threads("loop", message, plan)
            self.say(f"Executor: {loop}; {why_not}.")
            return Record(loop)
        race = self._race(message, plan)
        best = race.fastest or race.working(self._candidates(message, plan))
        self.say(f"Executor: {best}; {race.told() or 'the run is too short to time others'}.")
        if self._may_change:
            self._watched[plan.source] = Watch(race.pace)
        return Record(best)

    def _is_to_choose_again(self, source: str) -> bool:
        """Whether there was a surprise, and no other execution waits for its round already."""
        later = self._chosen[source].later
        waiting = bool(later) and later[-1][0] > self._round.get(source, 0)
        return source in self._watched and self._watched[source].surprised and not waiting

    def _choose_again(self, message: Message, plan: Plan) -> None:
        """Times the executions once more, and takes up a faster one from the next round on."""
        source, record, now = plan.source, self._chosen[plan.source], self._now(plan.source)
        race = self._race(message, plan, again=self._watched[source])
        best = race.fastest
        if best is None or race.seconds.get(now, math.inf) <= NOT_WORTH_IT * race.best:
            return
        self.say(
            f"Executor: {best} from the next round on, because {now} took other times than measured; {race.told()}."
        )
        self.adopt(source, record.then(self._round.get(source, 0) + 1, best).text())

    def _with_threads(self, name: str, message: Message, plan: Plan) -> Execution:
        """An execution with the threads that were given. Else a cohort under vmap is one thread's, with as many cores
        in an operator as it is worth, and a loop has as many threads as a client in each is worth."""
        chunk = 0 if name == "loop" else WHOLE
        if self._given_threads:
            return Execution(name, chunk, self.threads, self.threads)
        worth = self._worth(message, plan, len(plan) if chunk else self.threads)
        return Execution(name, chunk, 1 if chunk else worth, worth)

    def _worth(self, message: Message, plan: Plan, clients: int) -> int:
        """How many cores the work of so many clients is worth. Of tables by rows only those of a batch move."""
        product = self.cost(plan, message).of_a_product(plan.rows.shape[2])
        model, tables = self.algorithm.model, self.algorithm.rows.tables
        steps, slots = plan.rows.shape[1], rows.slots(tables, plan)
        looked_up = sum(slots[t] / steps * math.prod(model.shapes[t][1:]) for t in tables)
        moving = model.numbers(without=tables) + cores.LOOKED_UP * looked_up
        return cores.worth(product * clients, moving * clients, self.threads)

    def _candidates(self, message: Message, plan: Plan) -> dict[Execution, float]:
        """What may be timed, with the seconds that it promises, the most promising first: loop, vmap and, where it may
        pay, factors, in all threads, and, if no number of threads was given, in one."""
        found = []
        for name in ["factored", "vmap", "loop"] if self._sizes(plan).factored else ["vmap", "loop"]:
            usual, batched = self._with_threads(name, message, plan), name != "loop"
            for threads in [usual.threads] if self._given_threads else dict.fromkeys([usual.threads, 1, self.threads]):
                inside = self.threads if threads > 1 else self._worth(message, plan, len(plan) if batched else 1)
                limits = {"loop": (0,), "vmap": (self._sizes(plan).limit(name), WHOLE), "factored": (WHOLE,)}[name]
                sizes = {limit and self._chunk_of(plan, name, threads, limit): limit for limit in limits}
                if len(sizes) > 1:
                    sizes.pop(1, None)  # chunks of one client are a slow loop
                found += [Execution(name, limit, threads, inside) for limit in sorted(sizes.values(), reverse=True)]
        cost, convolves = self.cost(plan, message), self.algorithm.model.has_convolutions

        def expected(how: Execution) -> float:
            numbers = self._sizes(plan).numbers(how.name)
            return promise.seconds(self._sized(how, plan), plan, cost, numbers, convolves=convolves)

        return dict(sorted(((how, expected(how)) for how in found), key=lambda pair: pair[1]))

    def _race(self, message: Message, plan: Plan, again: Watch | None = None) -> Race:
        """Times the candidates on clients of this cohort, for what of the run's time may be spent on it; ``again``
        after a surprise, the present one first."""
        candidates = self._candidates(message, plan)
        now = [self._now(plan.source)] if again else []
        sized = {how: self._sized(how, plan) for how in candidates}
        few = plan.first_clients(2 * self.threads * max(how.chunk for how in sized.values()))

        work = math.inf if self._rounds is None else self._rounds * len(plan) * float(few.steps.mean())
        trial = Trial(few.steps, lambda how: sized[how].chunk or 1)

        def attempt(how: Execution, clients: int) -> None:
            cohort = Cohort.alike(message, few.first_clients(clients), sized[how])
            execute(self.algorithm, [cohort], self.privates, self.pool)

        def refuse(how: Execution, error: InputError) -> None:
            if how.name == "loop":
                raise error
            why = str(error.__cause__ or error).splitlines()[0]
            self.say(f"Executor: {how.name} cannot run this model ({why}).")

        race = Race(attempt, trial, work, refuse, candidates.__getitem__)
        if again:
            race = replace(race, share=AGAIN, spent=again.spent, pace=again.expected)
        race.run([how for how in dict.fromkeys([*now, *candidates]) if how in candidates])
        if again:
            again.begin(race)
        return race

    def _sized(self, how: Execution, plan: Plan) -> Execution:
        """The execution with chunks for this cohort."""
        if not how.chunk:
            return how
        return replace(how, chunk=self._chunk_of(plan, how.name, how.threads, how.chunk))

    def _chunk_of(self, plan: Plan, name: str, threads: int, limit: int) -> int:
        return self._sizes(plan).chunk(len(plan), name, threads, limit, self.memory)

    def _sizes(self, plan: Plan) -> Sizes:
        """What clients of plans in this shape take, worked out once."""
        key = plan.source, plan.rows.shape[1:]
        if key not in self._known_sizes:
            self._known_sizes[key] = Sizes(self.algorithm, plan, self._chunk)
        return self._known_sizes[key]

    def _vmap_cannot(self, plan: Plan) -> str | None:
        if vmap.MISSING:
            return vmap.MISSING
        full = plan.rows.shape[2]
        if self.algorithm.model.has_batch_norm and bool(((plan.counts > 0) & (plan.counts < full)).any()):
            return "BatchNorm would take the padding of ragged batches for examples"
        return None
