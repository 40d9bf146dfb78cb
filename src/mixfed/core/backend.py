"""The seam between the loop and whatever runs the clients: this process, many processes, a network.

Above the seam are the algorithm, the policy (whom to ask, how many updates make a step, what becomes of late ones) and
the book of jobs in flight. Below it are the clients and the clock: virtual where clients are simulated, real where they
are devices. A backend sends messages, lets time pass, tells who has reported, and hands over what came up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mixfed.core.algorithm import Algorithm, Message, Private, Reply
from mixfed.core.jobs import JobBook, Jobs, Times
from mixfed.core.ledger import Ledger
from mixfed.core.schedule import Schedule
from mixfed.core.tree import Params
from mixfed.data.store import CentralData, FederatedData


@dataclass(frozen=True)
class Run:
    """What a backend is told of the run that it serves.

    ``data`` are the clients' own examples, of which a backend whose clients are elsewhere makes no use. ``central`` is
    what the server holds. ``books`` has the jobs in flight of every source; the backend only reads them. ``rounds`` is
    how many there will be, if that is known.
    """

    algorithm: Algorithm
    data: Mapping[str, FederatedData]
    central: Mapping[str, CentralData]
    schedule: Schedule
    seed: int
    ledger: Ledger
    books: Mapping[str, JobBook] = field(default_factory=dict)
    rounds: int | None = None


@dataclass(frozen=True)
class Reports:
    """What :meth:`Backend.wait` saw: the time now, and by source the jobs that were reported, with their times.

    ``lost`` are jobs that are known never to be reported (their device has gone): nobody waits for them any longer.
    ``over`` says that none of the other jobs in flight will ever be reported.
    """

    now: float
    jobs: Mapping[str, tuple[NDArray[np.int64], Times]]
    over: bool = False
    lost: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


@dataclass(frozen=True)
class Collected:
    """The replies of jobs, the clients whose update was dropped, and the norms of all updates by client.

    A client drops its update where a number in it is not finite (then the norm is not finite either), or where its norm
    is beyond the algorithm's bound.
    """

    replies: list[Reply]
    dropped: list[int] = field(default_factory=list)
    norms: dict[int, float] = field(default_factory=dict)


class Clients(Protocol):
    """What an evaluation may ask about the private parts of clients (:class:`mixfed.core.private.PrivateStore`)."""

    def seen(self, source: str) -> NDArray[np.int64]: ...

    def get(self, source: str, client: int) -> Private: ...


@dataclass(frozen=True)
class Question:
    """A federated evaluation: clients' own models on their own examples ``on`` (test, validation)."""

    on: str
    metrics: Sequence[str]
    clients: NDArray[np.int64]


@runtime_checkable
class RemoteClients(Protocol):
    """Clients whose private parts stay where they are: they answer questions with sums over their examples."""

    def ask(self, params: Params, question: Question) -> dict[str, float]:
        """The mean of each metric over the examples of all these clients."""


class Backend(Protocol):
    """Where clients run. docs/adding-a-backend.md has a whole one."""

    def start(self, run: Run, saved: Mapping[str, Any] | None) -> None:
        """Takes up a run, from what :meth:`state` gave at its last checkpoint if there is one."""

    def submit(self, jobs: Jobs, message: Message) -> None:
        """Sends a message to the clients of these jobs, which all are of one source and one round."""

    def wait(self, until: float, enough: int) -> Reports:
        """Lets time pass until ``enough`` more jobs are reported, at most until the clock reads ``until``.

        With ``enough`` = 0 nobody is waited for: the clock moves on to ``until``.
        """

    def collect(self, jobs: Jobs) -> Collected:
        """What came up from jobs that were reported.

        Clients that were sent the same message make one reply, or with ``uploads = "each"`` every client makes one, in
        the order of the jobs.
        """

    def discard(self, jobs: Jobs, *, reported: bool) -> None:
        """Forgets jobs. Clients that reported have trained, which counts, and keep what is theirs."""

    def clients(self) -> Any:
        """What evaluations see of the clients: :class:`Clients`, or :class:`RemoteClients` where they are elsewhere."""

    def state(self) -> dict[str, Any]:
        """What a resumed run must find again to be the same run, as a tree."""
