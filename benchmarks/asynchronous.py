"""What late clients and guided merging cost, measured in turn in one process.

An asynchronous round (FedBuff, delays of |N(0, 20)| rounds, so that clients of one round started from many versions) is
to cost at most 1.2 times a synchronous one (FedAvg) with as many client steps, run by the same executor. With ``auto``
a synchronous cohort may be run by vmap while late clients, which mostly come alone, are run by loop: this row has what
cannot be batched as well. Feddle's search is to cost at most 1.2
times as much as fine-tuning the same model with Adam on the same batches, with an atlas of 20.

Of the repeats the best counts, in which the machine disturbed least.

    python benchmarks/asynchronous.py    # a minute or two; on a busy machine only the processor time means something
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import mixfed as mf
from mixfed.algorithms.feddle.atlas import Atlas
from mixfed.algorithms.feddle.guidance import Merged
from mixfed.algorithms.feddle.search import searched
from mixfed.core.algorithm import Server
from mixfed.models import MODELS

CLIENTS, COHORT, ATLAS, STEPS, BATCH = 500, 10, 20, 20, 50
CLIENT_BATCH, ROUNDS = {"mlp": 32, "cnn": 8}, {"mlp": 100, "cnn": 6}
WARM = {"mlp": 60, "cnn": 15}
"""Rounds until about as many late clients arrive in a round as are asked (the CNN's come close)."""
SYNCHRONOUS, ASYNCHRONOUS, FINE_TUNING = "synchronous client", "asynchronous client", "fine-tuning step"


def model_of(name: str) -> mf.Model:
    torch.manual_seed(0)
    networks: dict[str, Callable[[], torch.nn.Module]] = {
        "mlp": lambda: MODELS["mlp"](inputs=784, outputs=10, hidden=[64]),
        "cnn": lambda: MODELS["cnn"](channels=1, outputs=10, size=28, widths=[32, 64, 64], dense=128),
    }
    return mf.Model(networks[name](), mf.cross_entropy)


def examples(count: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {"x": draw.random((count, 1, 28, 28), dtype=np.float32), "y": draw.integers(0, 10, count)}


Times = dict[str, list[tuple[float, float]]]
"""Seconds on the wall clock and of processor time, for every repeat."""


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def a_client(name: str, executor: str, *, late: bool, rounds: int, warm: int) -> tuple[float, float]:
    """What a client costs: the time of the rounds after the warm-up over the clients that reported in them."""
    model, each = model_of(name), 2 * CLIENT_BATCH[name]
    trainer = mf.LocalTrainer(model, mf.sgd(0.05), mf.Batching(CLIENT_BATCH[name], epochs=2))
    data = mf.FederatedData(examples(CLIENTS * each), np.arange(CLIENTS + 1) * each)
    laps: list[tuple[float, float, int]] = []
    mf.run(
        mf.fedbuff(trainer, buffer=0) if late else mf.fedavg(trainer),
        data,
        rounds=rounds + warm,
        schedule=mf.Schedule(COHORT, delays=mf.HalfNormal(20.0)) if late else mf.Schedule(COHORT),
        backend=mf.Simulator(executor),
        callbacks=[lambda record: laps.append((*now(), record.ledger["client_examples"]))],
    )
    clients = (laps[-1][2] - laps[warm - 1][2]) / (2 * each)
    return (laps[-1][0] - laps[warm - 1][0]) / clients, (laps[-1][1] - laps[warm - 1][1]) / clients


def at_server(name: str, repeats: int) -> Times:
    """A step of fine-tuning, and of the search with anchors in full precision and in 8 bits."""
    model = model_of(name)
    params, names = model.initial(), model.trainable
    width = sum(params[n].numel() for n in names)
    batching = mf.Batching(BATCH, steps=STEPS)
    trainer = mf.LocalTrainer(model, mf.adam(1e-3), batching)
    server = Server(0, 0, model, {"centre": mf.CentralData(examples(1000))})
    works: dict[str, Callable[[], object]] = {FINE_TUNING: lambda: server.train(trainer, params)}
    for bits in (32, 8):
        empty = Atlas.empty(ATLAS, width, bits, model.device, torch.float32)
        atlas, _ = empty.with_updates([0.01 * torch.randn(width) for _ in range(ATLAS)], 0)
        models, start = Merged(model, params, atlas, atlas.factors()), torch.full((ATLAS,), 1 / ATLAS)
        works[f"search step, {bits}-bit anchors"] = lambda m=models, c=start: searched(  # type: ignore[misc]
            m, mf.Search(batching), c, server
        )
    found: Times = {what: [] for what in works}
    for number in range(repeats + 1):  # in turn, so that a slow moment of the machine hits all alike
        for what, work in works.items():
            begin = now()
            work()
            if number:
                found[what].append(tuple((b - a) / STEPS for a, b in zip(begin, now(), strict=True)))  # type: ignore[arg-type]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--executor", default="loop,auto", help="one after another, each for both kinds of round")
    parser.add_argument("--models", default="mlp,cnn")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    table = Table(title=f"{COHORT} of {CLIENTS} clients a round, 4 steps; at the server steps of {BATCH}")
    for heading in ("model", "what", "wall ms", "ratio", "processor ms", "ratio"):
        table.add_column(heading, justify="left" if heading in ("model", "what") else "right")
    found: dict[str, dict[str, list[float]]] = {}
    for name in given.models.split(","):
        kinds = [(what, e) for e in given.executor.split(",") for what in (SYNCHRONOUS, ASYNCHRONOUS)]
        times: Times = {f"{what}, {executor}": [] for what, executor in kinds}
        for _ in range(given.repeats):
            for what, executor in kinds:
                late = what == ASYNCHRONOUS
                warm = WARM[name] if late else 2
                taken = a_client(name, executor, late=late, rounds=ROUNDS[name], warm=warm)
                times[f"{what}, {executor}"].append(taken)
        times |= at_server(name, 2 * given.repeats)
        found[name] = {what: [1000 * min(t[i] for t in taken) for i in (0, 1)] for what, taken in times.items()}
        for what, (wall, worked) in found[name].items():
            base = found[name][what.replace(ASYNCHRONOUS, SYNCHRONOUS) if " client, " in what else FINE_TUNING]
            ratios = ("", "") if base == [wall, worked] else (f"{wall / base[0]:.2f}", f"{worked / base[1]:.2f}")
            table.add_row(name, what, f"{wall:.2f}", ratios[0], f"{worked:.2f}", ratios[1])
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
