"""A site: devices that answer the parcels of a server, each with its own examples and its own private parts.

A site knows the algorithm, its own data and which clients it holds. It refuses a server that runs another version of
mixfed or another experiment.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mixfed.backends import wire
from mixfed.backends.keepsakes import Keepsakes
from mixfed.backends.parcels import Parcel, marks, refusal
from mixfed.backends.runtime import ClientRuntime, Measure
from mixfed.backends.together import Devices, Together, executor_of
from mixfed.core.algorithm import Algorithm
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError


@dataclass(frozen=True)
class Holding:
    """The clients of one source that a site holds: their numbers in the population, and their examples in that order.

    ``tests`` are the examples that they keep apart for evaluations, by name (test, validation).
    """

    numbers: Sequence[int]
    data: FederatedData
    tests: Mapping[str, FederatedData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.numbers) != len(self.data) or len(set(self.numbers)) < len(self.numbers):
            raise InputError(
                f"A site names each of its clients once, and it has {len(self.numbers)} numbers for the data of"
                f" {len(self.data)} clients."
            )
        self.data.require_no_empty_clients()


class Site:
    """Answers parcels. ``experiment`` is the fingerprint that the server computes as well, ``folder`` is where private
    parts are kept (in a folder for the experiment), ``measure`` is how clients evaluate.

    The clients of a parcel run as one cohort by ``executor``: factored, vmap, or loop, which runs them one after
    another and gives the simulator's bits. ``auto`` is loop for networks with convolutions or a million parameters and
    factored for others. Clients that cannot run together run one by one, and ``say`` is told why.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        holdings: Mapping[str, Holding],
        experiment: str,
        folder: str | Path,
        *,
        measure: Measure | None = None,
        executor: str = "auto",
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        if not re.fullmatch(r"[\w.-]+", experiment):
            raise InputError(f"An experiment is named by letters, digits, '.', '_' and '-', not {experiment!r}.")
        self.algorithm, self.holdings, self.experiment = algorithm, holdings, experiment
        self.folder = Path(folder) / experiment
        self.measure = measure
        self._runtimes: dict[tuple[str, int], ClientRuntime] = {}
        self._kept: dict[tuple[str, int], Keepsakes] = {}
        self.say = say
        self._together: dict[str, Together] = {}
        if (executor := executor_of(algorithm, executor)) != "loop":
            devices = Devices(algorithm.own.first(algorithm.model.initial()), self._kept)
            for source, holding in holdings.items():
                self._together[source] = Together(algorithm, source, holding.data, holding.numbers, executor, devices)

    def answer(self, parcel: Parcel) -> Parcel:
        """Answers a parcel: a greeting, one to measure the way with (echo), or requests to clients."""
        began = time.monotonic()
        header: dict[str, Any] = marks(self.experiment)
        if why := refusal(parcel.header, self.experiment):
            return Parcel(header | {"refused": why})
        if parcel.header["kind"] == "hello":
            held = {source: list(map(int, holding.numbers)) for source, holding in self.holdings.items()}
            return Parcel(header | {"clients": held})
        if parcel.header["kind"] == "echo":
            return Parcel(header, parcel.common)
        blocks = self._answers(parcel)
        return Parcel(header | {"seconds": time.monotonic() - began}, blocks=blocks)

    def _answers(self, parcel: Parcel) -> list[bytes]:
        common = wire.unpack(parcel.common, self.algorithm.model.device)
        clients = [(str(source), int(client)) for source, client in parcel.header["clients"]]
        if (together := self._cohort(parcel, common, clients)) is not None:
            return together
        found = []
        for i, (source, client) in enumerate(clients):
            try:
                runtime = self._begun(parcel, common, source, client)
                if parcel.blocks:
                    found.append(runtime.answer(parcel.blocks[i], common))
                else:
                    found.append(runtime.answer(parcel.common))
            except InputError as error:
                found.append(wire.pack({"refused": str(error)}))
        return found

    def _cohort(self, parcel: Parcel, common: wire.Unpacked, clients: list[tuple[str, int]]) -> list[bytes] | None:
        """What clients answer that train together; None where they cannot, and from then on run one by one."""
        source = clients[0][0] if clients else ""
        if parcel.header["kind"] != "train" or len(clients) < 2 or source not in self._together:
            return None
        try:
            for client in clients:
                self._begun(parcel, common, *client)
            return self._together[source].answer([client for _, client in clients], parcel.blocks, common)
        except InputError as error:
            self.say(f"The clients of '{source}' run one by one: {error}")
            del self._together[source]
            return None

    def _begun(self, parcel: Parcel, common: wire.Unpacked, source: str, client: int) -> ClientRuntime:
        """The device of a client, which begins the round of a parcel."""
        runtime = self._runtime(source, client)
        if parcel.header["kind"] != "evaluate":
            self._kept[source, client].begin(int(common[0]["round"]), int(parcel.header["settled"]))
        return runtime

    def _runtime(self, source: str, client: int) -> ClientRuntime:
        """The device of a client, which is made when it is first asked for."""
        if (source, client) not in self._runtimes:
            holding = self.holdings.get(source)
            if holding is None or client not in holding.numbers:
                raise InputError(f"This site does not hold client {client} of '{source}'.")
            place = np.array([list(holding.numbers).index(client)])
            untouched = self.algorithm.own.first(self.algorithm.model.initial())
            folder = self.folder / source / str(client)
            kept = self._kept[source, client] = Keepsakes(lambda: untouched, folder, self.algorithm.model.device)
            self._runtimes[source, client] = ClientRuntime(
                self.algorithm,
                source,
                client,
                holding.data.select(place),
                kept,
                tests={
                    name: CentralData(data.client(int(place[0])), data.prepare)
                    for name, data in holding.tests.items()
                    if data.sizes(place)[0] > 0
                },
                measure=self.measure,
            )
        return self._runtimes[source, client]
