"""The roll of a federation: which sites are there, and which clients each of them holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from mixfed.backends.clock import RealClock
from mixfed.backends.parcels import Parcel, Post, marks, refusal
from mixfed.errors import RunStopped

if TYPE_CHECKING:
    from mixfed.backends.federation import Terms

Client = tuple[str, int]
"""A source, and a client's number in it."""
T = TypeVar("T")

LOOK_AGAIN = 2.0
"""Seconds after which the roll is called again."""

SILENCE = 10.0
"""Seconds of waiting after which it is told who is waited for."""


class Roll:
    """Greets sites, and knows where clients are. A site that comes back under another number takes its clients over.

    ``possible`` is how many sites there can be at most: when all of them were refused, nobody is waited for.
    """

    def __init__(
        self,
        post: Post,
        experiment: str,
        terms: Terms,
        clock: RealClock,
        say: Callable[[str], None],
        possible: Callable[[], float] = lambda: inf,
    ) -> None:
        self.post, self.experiment, self.terms, self.clock, self.say = post, experiment, terms, clock, say
        self.possible = possible
        self.asked: dict[str, int] = {}
        """Greetings under way: their sites by name."""
        self._present: set[int] = set()
        self._greeted: set[int] = set()
        self._home: dict[Client, int] = {}
        self._refused: dict[int, str] = {}
        self._looked = -LOOK_AGAIN
        self._bad = 0

    def header(self, kind: str) -> dict[str, Any]:
        """The header of a parcel of this kind."""
        return marks(self.experiment) | {"kind": kind}

    def assemble(self, population: Collection[Client]) -> None:
        """Waits until every client of the population is there; goes on without some when the time is over."""
        wanted = set(population)

        def absent() -> str:
            missing = sorted(wanted - self._home.keys())
            names = ", ".join(f"{client} of '{source}'" for source, client in missing[:3])
            return f"{len(missing)} of {len(wanted)} clients are not there yet (client {names})"

        self._wait(lambda: self._home.keys() >= wanted, absent)
        if not self._home.keys() >= wanted:
            self.say(f"{absent()}; the run goes on without them.")

    def require_somebody(self) -> None:
        """Waits until there is a site, and stops the run where none comes."""
        if not self._present:
            self._wait(lambda: bool(self._present), lambda: "No site is there")

    def by_site(
        self, jobs: Iterable[tuple[tuple[str, int], int]]
    ) -> dict[int | None, list[tuple[tuple[str, int], int]]]:
        """Jobs, each with its client, by the site that holds the client; None for those whose site is not there."""
        found: dict[int | None, list[tuple[tuple[str, int], int]]] = {}
        for key, client in jobs:
            found.setdefault(self._home.get((key[0], client)), []).append((key, client))
        return found

    def hears(self, name: str, answer: Parcel | str) -> bool:
        """Whether an answer was to a greeting, which it then takes note of."""
        if name not in self.asked:
            return False
        self._meet(self.asked.pop(name), answer)
        return True

    def look_around(self) -> list[int]:
        """Greets sites that are new, now and then; the sites that have gone since."""
        if self.clock.tick() - self._looked < LOOK_AGAIN:
            return []
        self._looked = self.clock.tick()
        there = self.post.sites()
        gone = sorted(self._present - there)
        for site in gone:
            self.say(f"Site {site} has gone.")
            self._leave(site)
        self._refused = {site: why for site, why in self._refused.items() if site in there}
        new = sorted(there - self._greeted)
        self._greeted = (self._greeted & there) | set(new)
        self._greet(new)
        return gone

    def refused(self, answer: Parcel, count: int) -> str | None:
        """Why an answer cannot be used, in one sentence; None where it has what this experiment asked for."""
        why = answer.header.get("refused") or refusal(answer.header, self.experiment)
        if not why and len(answer.blocks) != count:
            why = f"The answer is for {len(answer.blocks)} clients, and {count} were asked."
        return str(why) if why else None

    def good(self) -> None:
        """A site has done its work."""
        self._bad = 0

    def bad(self, count: int, why: str) -> None:
        """So many jobs were lost; a run whose sites all fail, again and again, is stopped."""
        self._bad += count
        if self._bad > 5 + 3 * len(self._home):
            raise RunStopped(f"The last {self._bad} jobs were all lost, so the run stopped. {why}")

    def _meet(self, site: int, answer: Parcel | str) -> None:
        """Takes a site in, or refuses it."""
        why = (
            answer
            if isinstance(answer, str)
            else answer.header.get("refused") or refusal(answer.header, self.experiment)
        )
        if why or isinstance(answer, str):
            if isinstance(answer, str):  # it may do better the next time
                self._greeted.discard(site)
            if self._refused.get(site) != why:
                self.say(f"Site {site} is refused: {why}")
            self._refused[site] = str(why)
            return
        clients = {(str(source), int(n)) for source, numbers in answer.header["clients"].items() for n in numbers}
        for former in sorted({self._home[client] for client in clients if client in self._home} - {site}):
            theirs = {client for client, home in self._home.items() if home == former}
            if theirs <= clients:
                self.say(f"Site {former} has come back as site {site}.")
                self._leave(former)
            else:
                source, client = min(theirs & clients)
                told = f"{len(theirs & clients)} clients are on site {former} and on site {site}"
                self.say(f"{told} (client {client} of '{source}'); the latter is asked.")
        self._present.add(site)
        self._home |= dict.fromkeys(clients, site)

    def _leave(self, site: int) -> None:
        self._present.discard(site)
        self._home = {client: home for client, home in self._home.items() if home != site}

    def _greet(self, sites: Collection[int]) -> None:
        if not sites:
            return
        names = self.post.send([(site, Parcel(self.header("hello"))) for site in sites], self.terms.ttl)
        self.asked |= {name: site for site, name in zip(sites, names, strict=True) if name is not None}

    def _is_hopeless(self) -> bool:
        """Whether every site that there can be was refused."""
        return not self._present and len(self._refused) >= self.possible()

    def _wait(self, enough: Callable[[], bool], absent: Callable[[], str]) -> None:
        """Waits until there are enough or the time is over; stops the run where nobody has come."""
        began = self.clock.tick()
        until, silent = began + self.terms.assemble, True
        self.look_around()
        while not enough() and not self._is_hopeless() and self.clock.tick() < until:
            if silent and self.clock.tick() - began > SILENCE:
                self.say(f"{absent()}; the run waits for up to {self.terms.assemble:g} seconds.")
                silent = False
            for name, answer in self.post.receive(list(self.asked)):
                self.hears(name, answer)
            self.look_around()
            self.clock.sleep(self.terms.poll)
        if self._present:
            return
        if self._is_hopeless():
            raise RunStopped(f"No site joins the run: {next(iter(self._refused.values()), 'all of them have ended.')}")
        why = next(iter(self._refused.values()), "start sites that hold its clients, or wait for them longer.")
        raise RunStopped(f"No site has joined the run within {self.terms.assemble:g} seconds: {why}")
