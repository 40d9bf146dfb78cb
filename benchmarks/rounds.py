"""Synchronous rounds through the seam, with cohorts of one's own choice: what the loop does, without its policy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mixfed import Algorithm, FederatedData, Schedule, Server, Simulator
from mixfed.core.backend import Run
from mixfed.core.jobs import JobBook
from mixfed.core.ledger import Ledger


class Rounds:
    """An algorithm on simulated clients, one round after another; ``state`` is the algorithm's.

    ``rounds`` is how many the simulator is told to expect.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        data: Mapping[str, FederatedData],
        simulator: Simulator,
        rounds: int = 1000,
    ) -> None:
        self.algorithm, self.simulator, self.ledger, self.number = algorithm, simulator, Ledger(), 0
        self.book = JobBook("clients")
        run = Run(algorithm, data, {}, Schedule(1), 0, self.ledger, {"clients": self.book}, rounds)
        simulator.start(run, None)
        self.state = algorithm.init(algorithm.model.initial())

    def next(self, clients: NDArray[np.int64]) -> None:
        """One round of these clients."""
        server = Server(self.number, 0, self.algorithm.model, {}, self.ledger)
        messages, self.state = self.algorithm.broadcast(self.state, server)
        self.simulator.wait(float(self.number), 0)
        jobs = self.book.add(clients, self.number, self.number, float(self.number))
        self.simulator.submit(jobs, messages["clients"])
        self.simulator.wait(float(self.number), len(jobs))
        self.book.take(jobs)
        self.state = self.algorithm.step(self.state, self.simulator.collect(jobs).replies, server)
        self.book.end_round()
        self.number += 1
