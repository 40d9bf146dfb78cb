"""Messages to clients in flight: what they count for, and where they are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mixfed.algorithms.asynchronous import fedbuff
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches, Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import HalfNormal, Scripted
from mixfed.core.loop import Result
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.schedule import Schedule
from mixfed.core.train import LocalTrainer
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from tests.peak import Peak

WIDTH, CLIENTS = 256, 60


def algorithm() -> Algorithm:
    torch.manual_seed(0)
    model = Model(nn.Linear(WIDTH, WIDTH), cross_entropy)
    return fedbuff(LocalTrainer(model, sgd(0.1), Batching(2, steps=1)), buffer=0)


def data() -> FederatedData:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(2 * CLIENTS, WIDTH)).astype(np.float32), draw.integers(0, WIDTH, 2 * CLIENTS)
    return FederatedData.from_arrays({"x": x, "y": y}, np.arange(2 * CLIENTS) % CLIENTS)


def trained(backend: Simulator, rounds: int = 12, sd: float = 6.0, **options: Any) -> Result:
    schedule = Schedule(4, delays=HalfNormal(sd))
    return run(algorithm(), data(), rounds=rounds, schedule=schedule, backend=backend, **options)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_messages_kept_elsewhere_are_the_same_messages(place: Any, tmp_path: Path) -> None:
    expected = trained(Simulator("loop", threads=1)).params
    elsewhere = Simulator("loop", threads=1, in_flight=place)
    trained(elsewhere, rounds=5, checkpoints=Checkpoints(tmp_path))
    resumed = trained(elsewhere, checkpoints=Checkpoints(tmp_path), resume=True)
    for found in (trained(elsewhere), resumed):
        assert all(torch.equal(x, expected[n]) for n, x in found.params.items())
    with pytest.raises(InputError, match="Messages in flight"):
        Simulator(in_flight="cellar")  # type: ignore[arg-type]


def test_on_disk_they_take_no_memory() -> None:
    """Ten versions of the model are in flight at the end: clients with an even number never report in time."""
    size = tree.nbytes(algorithm().model.initial())
    slow = Scripted({(r, c): 99.0 for r in range(11) for c in range(0, CLIENTS, 2)})

    def peak(place: Any) -> int:
        with Peak() as seen:
            run(
                algorithm(), data(), rounds=11, schedule=Schedule(4, delays=slow),
                backend=Simulator("loop", threads=1, in_flight=place),
            )  # fmt: skip
        return seen.bytes

    here, there = peak("device"), peak("disk")
    assert here > 10 * size
    assert here - there > 7 * size


def counted(base: Algorithm) -> tuple[Algorithm, list[int]]:
    """The algorithm, and a list with an entry for every vmapped chunk."""
    chunks: list[int] = []

    def client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        chunks.append(message.round)
        return base.client(message, private, batches)

    return replace(base, client=client), chunks


def test_they_count_against_the_memory_of_the_simulator() -> None:
    """Room for four clients at once, until ten earlier messages are in flight: then for fewer."""
    model_bytes = tree.nbytes(algorithm().model.initial())
    client_bytes = 3 * model_bytes + 4 * 2 * (WIDTH * 4 + 8) + 1
    slow = Scripted({(r, c): 99.0 for r in range(11) for c in range(0, CLIENTS, 2)})
    watched, chunks = counted(algorithm())
    memory = 4 * client_bytes + model_bytes

    def per_round(place: Any) -> dict[int, int]:
        chunks.clear()
        backend = Simulator("vmap", threads=1, memory=memory, in_flight=place)
        schedule = Schedule(8, delays=slow)
        run(watched, data(), rounds=8, schedule=schedule, backend=backend)
        return {r: chunks.count(r) for r in range(8)}

    asked = per_round("disk")
    held = per_round("device")
    assert held[0] == asked[0]
    assert sum(held.values()) > sum(asked.values())
    tiny = Simulator("vmap", threads=1, memory=3 * model_bytes)
    with pytest.raises(InputError, match="in_flight"):
        run(watched, data(), rounds=8, schedule=Schedule(8, delays=slow), backend=tiny)


def test_rounds_without_a_step_between_them_share_a_message_resumed_or_not(tmp_path: Path) -> None:
    """Four updates make a step, two clients are asked in a round, and those with an even number never report in time:
    of the messages in flight, most are alike. There is memory for those that differ, and not for one of each round."""
    slow = Scripted({(r, c): 99.0 for r in range(12) for c in range(0, CLIENTS, 2)})
    size = tree.nbytes(algorithm().model.initial())

    def go(rounds: int, place: Any = "device", **options: Any) -> tuple[Result, Simulator]:
        backend = Simulator("vmap", threads=1, memory=5 * size, in_flight=place)
        schedule = Schedule(2, delays=slow, buffer=4)
        return run(algorithm(), data(), rounds=rounds, schedule=schedule, backend=backend, **options), backend

    straight, backend = go(10)
    sent = backend.state()["messages"]["clients"]
    assert len(sent["rounds"]) - 1 > 5
    assert len(sent["tensors"]) < 5
    for place in ("device", "disk"):
        folder = Checkpoints(tmp_path / place)
        go(7, place, checkpoints=folder)
        saved = folder.load()
        assert saved is not None
        kept = saved["backend"]["messages"]["clients"]
        assert len(kept["tensors"]) < len(kept["rounds"])
        resumed, again = go(10, place, checkpoints=folder, resume=True)
        assert all(torch.equal(x, straight.params[n]) for n, x in resumed.params.items())
        assert len(again.state()["messages"]["clients"]["tensors"]) == len(sent["tensors"])
