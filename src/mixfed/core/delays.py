"""How long a client takes to report, in rounds of the virtual clock.

A delay is a function of (seed, round, source, client) and of nothing else: a run that is resumed, or whose clients are
asked in another order, finds the same delays. An infinite delay is a client that never reports.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mixfed import rng
from mixfed.errors import InputError
from mixfed.ranges import NotNegative, PartOfOne, Positive, within_ranges

Delays = NDArray[np.float64]
Delay = Callable[[int, int, str, NDArray[np.int64]], Delays]
"""``delay(seed, round, source, clients)``: for each of the clients asked in this round, after how long it reports."""


def none(seed: int, round: int, source: str, clients: NDArray[np.int64]) -> Delays:
    """Every client reports at once: synchronous training."""
    return np.zeros(len(clients))


@dataclass(frozen=True)
class Scripted:
    """The delays of a table by (round, client), and ``otherwise`` where it has none."""

    table: Mapping[tuple[int, int], float]
    otherwise: float = 0.0

    def __post_init__(self) -> None:
        if not all(delay >= 0 for delay in (*self.table.values(), self.otherwise)):
            raise InputError("Scripted delays must be numbers of at least 0 rounds (infinity: it never reports).")

    def __call__(self, seed: int, round: int, source: str, clients: NDArray[np.int64]) -> Delays:
        return np.array([self.table.get((round, int(c)), self.otherwise) for c in clients], dtype=np.float64)


@within_ranges()
@dataclass(frozen=True)
class HalfNormal:
    """|N(0, sd)| rounds, as in the Feddle paper (sd 5 and 20)."""

    sd: NotNegative

    def __call__(self, seed: int, round: int, source: str, clients: NDArray[np.int64]) -> Delays:
        return np.abs(_normal(seed, "delay", round, source, clients)) * self.sd


@within_ranges()
@dataclass(frozen=True)
class LogNormal:
    """exp(N(log median, sigma)) seconds, where a round of the clock lasts ``seconds_per_round``."""

    median: Positive
    sigma: NotNegative
    seconds_per_round: Positive = 1.0

    def __call__(self, seed: int, round: int, source: str, clients: NDArray[np.int64]) -> Delays:
        seconds = self.median * np.exp(self.sigma * _normal(seed, "delay", round, source, clients))
        return np.asarray(seconds / self.seconds_per_round)


@within_ranges()
@dataclass(frozen=True)
class SpeedClasses:
    """Another delay times the factor of the client's class; a client is of one class for the whole run.

    ``shares`` are the sizes of the classes (all alike if left out).
    """

    base: Delay
    factors: Sequence[NotNegative]
    shares: Sequence[NotNegative] = ()

    def __post_init__(self) -> None:
        if not self.factors or (self.shares and len(self.shares) != len(self.factors)):
            raise InputError("Speed classes need a factor each, and as many shares as factors.")
        if self.shares and not sum(self.shares) > 0:
            raise InputError("The shares of the speed classes are all 0; give one of them more.")

    def __call__(self, seed: int, round: int, source: str, clients: NDArray[np.int64]) -> Delays:
        shares = np.asarray(self.shares or [1.0] * len(self.factors))
        edges = np.cumsum(shares / shares.sum())[:-1]
        kind = np.searchsorted(edges, _uniform(seed, "speed", 0, source, clients), side="right")
        factors: Delays = np.asarray(self.factors, np.float64)[kind]
        return self.base(seed, round, source, clients) * factors


@within_ranges()
@dataclass(frozen=True)
class Dropouts:
    """Another delay, but a job is lost with this probability: its client never reports."""

    base: Delay
    probability: PartOfOne

    def __call__(self, seed: int, round: int, source: str, clients: NDArray[np.int64]) -> Delays:
        lost = _uniform(seed, "dropout", round, source, clients) < self.probability
        return np.where(lost, np.inf, self.base(seed, round, source, clients))


@dataclass(frozen=True)
class Trace:
    """Delays that were measured: a CSV file with a column ``delay`` and, if wished, columns ``client`` and ``round``.

    A job takes one of the lines by chance; where the file has lines of its client, one of those; and where it has the
    line of its client and its round (as a federation writes them, delays.csv), that one.
    """

    file: str
    delays: Delays = field(init=False, repr=False, compare=False)
    lines: dict[int, NDArray[np.int64]] = field(init=False, repr=False, compare=False)
    exact: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            with open(self.file, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            delays = np.array([float(row["delay"]) for row in rows])
        except OSError as error:
            raise InputError(f"The trace of delays {self.file} cannot be read: {error.strerror}.") from error
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"The trace {self.file} needs a number in the column 'delay' of every line.") from error
        if not len(delays) or not (delays >= 0).all():
            raise InputError(f"The trace {self.file} needs lines with delays of at least 0 rounds.")
        try:
            owners = np.array([int(row.get("client") or -1) for row in rows])
            rounds = [int(row.get("round") or -1) for row in rows]
        except ValueError as error:
            raise InputError(
                f"The trace {self.file} has a 'client' or 'round' that is not the number of one."
            ) from error
        exact = {(r, c): i for i, (r, c) in enumerate(zip(rounds, owners.tolist(), strict=True)) if r >= 0}
        object.__setattr__(self, "exact", exact)
        object.__setattr__(self, "delays", delays)
        object.__setattr__(self, "lines", {int(c): np.flatnonzero(owners == c) for c in np.unique(owners)})

    def __call__(self, seed: int, round: int, source: str, clients: NDArray[np.int64]) -> Delays:
        chance = _uniform(seed, "trace", round, source, clients)
        every = np.arange(len(self.delays))
        found = [self.lines.get(int(c), self.lines.get(-1, every)) for c in clients]
        drawn = [int(lines[int(u * len(lines))]) for lines, u in zip(found, chance, strict=True)]
        chosen = [self.exact.get((round, int(c)), line) for c, line in zip(clients, drawn, strict=True)]
        return self.delays[np.array(chosen, dtype=np.int64)]


def at_once() -> Delay:
    """No delay."""
    return none


DELAYS: dict[str, Callable[..., Delay]] = {
    "none": at_once,
    "half_normal": HalfNormal,
    "log_normal": LogNormal,
    "trace": Trace,
}


def _bits(seed: int, purpose: str, round: int, source: str, clients: NDArray[np.int64]) -> NDArray[np.uint64]:
    return rng.bits(rng.key(seed, f"{purpose}/{source}", round), clients)


def _uniform(seed: int, purpose: str, round: int, source: str, clients: NDArray[np.int64]) -> Delays:
    """In [0, 1), 53 bits."""
    return (_bits(seed, purpose, round, source, clients) >> np.uint64(11)).astype(np.float64) / (1 << 53)


def _normal(seed: int, purpose: str, round: int, source: str, clients: NDArray[np.int64]) -> Delays:
    """Box and Muller's transform of two uniform numbers."""
    radius = np.sqrt(-2 * np.log1p(-_uniform(seed, f"{purpose}/radius", round, source, clients)))
    return np.asarray(radius * np.cos(2 * np.pi * _uniform(seed, f"{purpose}/angle", round, source, clients)))
