"""Ways to run a cohort, and the record of those that a run has chosen."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mixfed.errors import InputError

WHOLE = 1 << 30
"""No limit to a chunk but a thread's share of the cohort."""


@dataclass(frozen=True)
class Execution:
    """A way to run a cohort: ``chunk`` = 0 runs clients one by one, else at most that many at once under vmap.

    So many ``threads`` work side by side, at most; one that is alone has all ``cores`` in each operator."""

    name: str
    chunk: int
    threads: int
    cores: int = 1

    def text(self) -> str:
        """The execution as a text that :meth:`parsed` reads, for a run that is to be repeated."""
        return f"{self.name} chunk={self.chunk} threads={self.threads} cores={self.cores}"

    @classmethod
    def parsed(cls, text: str) -> Execution:
        """The execution of such a text."""
        found = re.fullmatch(r"(loop|vmap|factored) chunk=(\d+) threads=(\d+) cores=(\d+)", text)
        if found is None or (int(found[2]) == 0) != (found[1] == "loop") or not int(found[3]) * int(found[4]):
            raise InputError(f"'{text}' is no execution that a run could have chosen; leave it out to choose anew.")
        return cls(found[1], *map(int, found.groups()[1:]))

    def __str__(self) -> str:
        limit = f"chunks of at most {self.chunk}" if self.chunk < WHOLE else "a chunk for every thread"
        how = limit if self.chunk else "one client at a time"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.name} ({how}, {threads}{f' on {self.cores} cores' if self.cores > self.threads else ''})"


@dataclass(frozen=True)
class Record:
    """The executions of a source's cohorts: the first one, and others from later rounds on."""

    first: Execution
    later: tuple[tuple[int, Execution], ...] = ()

    def at(self, round: int) -> Execution:
        """The execution in this round."""
        return next((how for begin, how in reversed(self.later) if begin <= round), self.first)

    def then(self, round: int, how: Execution) -> Record:
        """The same, and another execution from this round on."""
        return Record(self.first, (*self.later, (round, how)))

    def text(self) -> str:
        """The record as a text that :meth:`parsed` reads."""
        return "; from ".join([self.first.text(), *(f"{begin} on {how.text()}" for begin, how in self.later)])

    @classmethod
    def parsed(cls, text: str) -> Record:
        """The record of such a text."""
        first, *others = text.split("; from ")
        found = cls(Execution.parsed(first))
        for other in others:
            begin, _, how = other.partition(" on ")
            if not begin.isdecimal() or (found.later and int(begin) <= found.later[-1][0]):
                raise InputError(f"'{text}' is no list of executions, each from a later round on; leave it out.")
            found = found.then(int(begin), Execution.parsed(how))
        return found
