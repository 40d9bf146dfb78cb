"""A backend whose clients are devices elsewhere: real time, real losses, and parcels that a post carries.

The policy is the simulator's. Its clock is real (:class:`mixfed.backends.clock.RealClock`): a round lasts at most
``deadline`` seconds and ends early when all have reported. A device that has gone is a job lost, an answer that cannot
be used is an update dropped, and both are named and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mixfed.backends import wire
from mixfed.backends.clock import RealClock
from mixfed.backends.correspondence import Correspondence, evaluation, mean_of
from mixfed.backends.parcels import Parcel, Post
from mixfed.backends.roll import Roll
from mixfed.core.algorithm import CLIENTS, Message, Upload
from mixfed.core.backend import Collected, Question, Reports, Run
from mixfed.core.jobs import Jobs
from mixfed.core.tree import Params
from mixfed.errors import InputError, RunStopped

Key = tuple[str, int]
"""A job: the source, and its number."""
Part = tuple[int, list[tuple[Key, int]], bytes, list[bytes]]
"""What one site is sent: the site, the jobs with their clients, the common bytes, and a block for each job."""


@dataclass(frozen=True)
class Terms:
    """How long a federation waits, in seconds.

    A round lasts at most ``deadline``. A message that was not answered within ``ttl`` is lost. At the beginning, and
    when all sites have gone, ``assemble`` is how long sites are waited for. Answers are looked for every ``poll``.
    """

    deadline: float = 60.0
    ttl: float = 3600.0
    assemble: float = 120.0
    poll: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < np.inf:
                raise InputError(f"The {name} of a federation is a number of seconds above 0, not {value}.")


@dataclass(frozen=True)
class _Sent:
    """A parcel under way: what it asks, where it went, the jobs in it with their clients, and their round."""

    kind: str
    site: int
    jobs: list[tuple[Key, int]]
    round: int


@dataclass
class Traffic:
    """What really happened, beside the ledger: bytes of all parcels, how many there were, and what became of jobs.

    ``seconds`` is from sending a job to its report, summed over jobs, and ``at_work`` is the part of it in which the
    site was computing; the rest is transfer, waiting and whatever the post does.
    """

    bytes_down: int = 0
    bytes_up: int = 0
    parcels: int = 0
    jobs: int = 0
    lost: int = 0
    refused: int = 0
    unwanted: int = 0
    seconds: float = 0.0
    at_work: float = 0.0


class Federation:
    """Runs an algorithm on sites that a ``post`` reaches.

    ``experiment`` is the fingerprint that the sites compute as well. ``observe`` is told of every report: the source,
    the client, the round that asked it, and how long it took in rounds of the clock. ``say`` is told of every site that
    comes, goes or is refused, and of every update that is dropped. ``possible`` says how many sites there can be at
    most, where that is known: a run is not kept waiting when all of them were refused.
    """

    def __init__(
        self,
        post: Post,
        experiment: str,
        terms: Terms | None = None,
        *,
        observe: Callable[[str, int, int, float], None] = lambda source, client, round, delay: None,
        say: Callable[[str], None] = lambda sentence: None,
        clock: RealClock | None = None,
        possible: Callable[[], float] = lambda: np.inf,
    ) -> None:
        self.post, self.experiment, self.terms = post, experiment, terms or Terms()
        self.observe, self.say, self.possible = observe, say, possible
        self.clock = clock or RealClock(self.terms.deadline)
        self.traffic = Traffic()

    def start(self, run: Run, saved: Mapping[str, Any] | None) -> None:
        """Waits for sites and takes up a run; jobs that were in flight at its checkpoint are sent again."""
        self.run, self.letters = run, Correspondence(run, self.say)
        self._roll = Roll(self.post, self.experiment, self.terms, self.clock, self.say, self.possible)
        self._under_way: dict[str, _Sent] = {}
        self._open: dict[Key, float] = {}
        self._answers: dict[Key, bytes] = {}
        self._news: list[Key] = []
        self._lost: list[Key] = []
        self._settled = [0, 0]
        self._round = -1
        population = {(source, c) for source in run.algorithm.batching for c in range(len(run.data[source]))}
        if population:
            self._roll.assemble(population)
        self.clock.set(float(saved["now"]) if saved else 0.0)
        if saved is None:
            return
        self.letters.restore(saved["letters"])
        self.traffic = Traffic(**saved["traffic"])
        self._settled = [int(x) for x in saved["settled"]]
        for source, answers in saved["answers"].items():
            self._answers |= {(source, int(number)): wire.to_bytes(x) for number, x in answers.items()}
        for source, book in run.books.items():
            for round, jobs in book.unreported().by_round():
                known = np.array([(source, n) in self._answers for n in jobs.numbers.tolist()], bool)
                self._news += [(source, n) for n in jobs[known].numbers.tolist()]
                if len(again := jobs[~known]):
                    self._dispatch(again, self.letters.messages[source].of(round))

    def state(self) -> dict[str, Any]:
        """Messages in flight, answers that nobody has collected yet, and what has travelled so far.

        Devices are told from which round on this run may come back: that of the checkpoint before this one, or of the
        oldest job that was in flight then.
        """
        answers: dict[str, dict[str, Any]] = {source: {} for source in self.run.algorithm.batching}
        for (source, number), answer in self._answers.items():
            answers[source][str(number)] = wire.to_tensor(answer)
        rounds = [round for book in self.run.books.values() for round in book.rounds()]
        self._settled = [self._settled[-1], min([*rounds, self._round + 1])]
        kept = {"answers": answers, "letters": self.letters.state(), "traffic": dict(vars(self.traffic))}
        return {"now": self.clock.read(), "settled": self._settled, **kept}

    def clients(self) -> Federation:
        """The devices, which answer questions; their private parts stay with them."""
        return self

    def submit(self, jobs: Jobs, message: Message) -> None:
        """Sends a message to the sites of these clients, after a question where the answer decides what is sent."""
        self.letters.messages[jobs.source].add(message)
        self._round = message.round
        self._roll.require_somebody()
        self._dispatch(jobs, message)

    def wait(self, until: float, enough: int) -> Reports:
        """Waits in real time; with ``enough`` = 0 nobody is waited for, and the clock is set: a round begins."""
        self.letters.forget_messages()
        self._hear()
        while enough and self._open and len(self._news) + len(self._lost) < enough and self.clock.read() < until:
            self.clock.sleep(self.terms.poll)
            self._hear()
        if not enough:
            self.clock.set(until)
        now = min(self.clock.read(), until)
        heard, lost = _by_source(self._news), _by_source(self._lost)
        self._news, self._lost = [], []
        times = {source: (numbers, np.full(len(numbers), now)) for source, numbers in heard.items()}
        return Reports(now, times, over=not self._open, lost=lost)

    def collect(self, jobs: Jobs) -> Collected:
        """Reads what came up from these jobs."""
        uploads: dict[int, Upload | None] = {}
        for client, number in zip(jobs.clients.tolist(), jobs.numbers.tolist(), strict=True):
            uploads[number] = self._read(jobs.source, client, number)
        return self.letters.collected(jobs, uploads)

    def discard(self, jobs: Jobs, *, reported: bool) -> None:
        """Forgets jobs; those that reported have trained, which counts."""
        for client, number in zip(jobs.clients.tolist(), jobs.numbers.tolist(), strict=True):
            self._open.pop((jobs.source, number), None)
            if reported:
                self.traffic.unwanted += 1
                self._read(jobs.source, client, number, wanted=False)
        self.letters.forget(jobs.source, jobs.numbers.tolist())

    def ask(self, params: Params, question: Question) -> dict[str, float]:
        """A federated evaluation: clients answer with sums over their own examples, within a round's deadline."""
        groups = self._roll.by_site([((CLIENTS, c), c) for c in question.clients.tolist()])
        common, until = evaluation(params, question), self.clock.tick() + self.terms.deadline
        names = self._send("evaluate", [(site, jobs, common, []) for site, jobs in groups.items() if site is not None])
        found: list[bytes] = []
        self._evaluated = found  # filled as answers come
        while any(name in self._under_way for name in names) and self.clock.tick() < until:
            self._hear()
            self.clock.sleep(self.terms.poll)
        if len(found) < len(question.clients):
            told = f"Only {len(found)} of {len(question.clients)} clients answered an evaluation"
            self.say(f"{told} within {self.terms.deadline:g} seconds.")
        if not found:
            raise RunStopped("No client answered an evaluation; look at the sites, or raise the deadline.")
        return mean_of(found, question)

    def _read(self, source: str, client: int, number: int, *, wanted: bool = True) -> Upload | None:
        try:
            upload = self.letters.read(source, client, number, self._answers.pop((source, number)), wanted=wanted)
        except InputError as error:
            self.traffic.refused += 1
            self.say(f"An update of client {client} of '{source}' is dropped: {error}")
            return None
        if upload is None and wanted:
            self.say(f"An update of client {client} of '{source}' is dropped: it is not finite, or beyond the bound.")
        return upload

    def _dispatch(self, jobs: Jobs, message: Message) -> None:
        question = self.letters.question(message)
        keys = [((jobs.source, n), c) for n, c in zip(jobs.numbers.tolist(), jobs.clients.tolist(), strict=True)]
        groups = self._roll.by_site(keys)
        self._open |= dict.fromkeys((key for key, _ in keys), self.clock.tick())
        self._lose((key for key, _ in groups.pop(None, [])), "")
        if question:
            parts: list[Part] = [(site, some, question, []) for site, some in groups.items() if site is not None]
            self._send("prepare", parts, message.round)
        else:
            self._post_letters({site: [(*job, None) for job in some] for site, some in groups.items()}, message)

    def _post_letters(self, groups: Mapping[int | None, list[tuple[Key, int, bytes | None]]], message: Message) -> None:
        """Writes the letters of jobs, with what their clients answered to the question, and sends a parcel a site."""
        question = self.letters.question(message)
        parts: list[Part] = []
        for site, jobs in groups.items():
            written, common, blocks = [], b"", []
            for (source, number), client, answer in jobs:
                try:
                    letter = self.letters.letter(source, client, number, message, question, answer)
                except (InputError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
                    self.traffic.refused += 1
                    self._lose([(source, number)], f"Client {client} of '{source}' cannot be sent its work: {error}")
                    continue
                written.append(((source, number), client))
                common = letter.common
                blocks.append(letter.own)
            if written and site is not None:
                parts.append((site, written, common, blocks))
        self._send("train", parts, message.round)

    def _send(self, kind: str, parts: list[Part], round: int = -1) -> list[str]:
        """Posts a parcel to each site; their names."""
        if not parts:
            return []
        parcels = []
        for site, jobs, common, blocks in parts:
            header = self._roll.header(kind) | {
                "clients": [[source, client] for (source, _), client in jobs],
                "settled": self._settled[0],
            }
            parcels.append((site, Parcel(header, common, blocks)))
            self.traffic.bytes_down += parcels[-1][1].nbytes
        self.traffic.parcels += len(parcels)
        names = []
        for name, (site, jobs, *_) in zip(self.post.send(parcels, self.terms.ttl), parts, strict=True):
            if name is None:
                self._lose((key for key, _ in jobs), f"A parcel to site {site} could not be sent.")
                continue
            self._under_way[name] = _Sent(kind, site, jobs, round)
            names.append(name)
        return names

    def _hear(self) -> None:
        """Takes the answers that have come, and looks who is there."""
        for name, answer in self.post.receive([*self._under_way, *self._roll.asked]):
            if self._roll.hears(name, answer):
                continue
            sent = self._under_way.pop(name, None)
            if sent is None:
                continue  # a second answer to the same parcel
            if isinstance(answer, str):
                self._lose((key for key, _ in sent.jobs), f"Site {sent.site} does not answer: {answer}")
            else:
                self.traffic.bytes_up += answer.nbytes
                self._take(sent, answer)
        for site in self._roll.look_around():
            for name, sent in list(self._under_way.items()):
                if sent.site == site:
                    del self._under_way[name]
                    self._lose((key for key, _ in sent.jobs), "")

    def _take(self, sent: _Sent, answer: Parcel) -> None:
        """What an answered parcel brings: needs of clients, updates, or sums of an evaluation."""
        why = self._roll.refused(answer, len(sent.jobs))
        blocks = [wire.pack({"refused": why})] * len(sent.jobs) if why else answer.blocks
        if sent.kind == "evaluate":
            self._evaluated += self._usable(blocks, sent)
            return
        still: list[tuple[Key, int, bytes | None]] = [
            (key, client, block) for (key, client), block in zip(sent.jobs, blocks, strict=True) if key in self._open
        ]
        if sent.kind == "prepare":
            if still:
                source = still[0][0][0]
                self._post_letters({sent.site: still}, self.letters.messages[source].of(sent.round))
            return
        self._roll.good()
        for key, client, block in still:
            seconds = self.clock.tick() - self._open.pop(key)
            self._answers[key] = block or b""
            self._news.append(key)
            self.observe(key[0], client, sent.round, seconds / self.clock.seconds)
            self.traffic.jobs += 1
            self.traffic.seconds += seconds
            self.traffic.at_work += float(answer.header.get("seconds", 0.0))

    def _usable(self, blocks: Iterable[bytes], sent: _Sent) -> list[bytes]:
        """The answers to an evaluation without refusals, which are told."""
        found = []
        for ((source, _), client), block in zip(sent.jobs, blocks, strict=True):
            told, _ = wire.unpack(block)
            if "refused" in told:
                self.say(f"Client {client} of '{source}' does not evaluate: {told['refused']}")
            else:
                found.append(block)
        return found

    def _lose(self, keys: Iterable[Key], why: str) -> None:
        """These jobs will never be reported."""
        gone = [key for key in keys if key in self._open]
        for key in gone:
            del self._open[key]
        self._lost += gone
        self.traffic.lost += len(gone)
        if gone and why:
            self.say(why)
            self._roll.bad(len(gone), why)


def _by_source(keys: Iterable[Key]) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
    found: dict[str, list[int]] = {}
    for source, number in keys:
        found.setdefault(source, []).append(number)
    return {source: np.array(sorted(numbers), np.int64) for source, numbers in found.items()}
