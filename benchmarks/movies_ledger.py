"""What a client of the movie recommender sends and computes in a round: measured, beside the paper's closed forms.

One round of every method on the clients of MovieLens 1M (K 10, B 16, a history of ten), with tables of 3,952 rows and,
for the same clients, of up to a million. Above 4,000 rows the baseline by pairs is computed, not run.

    python benchmarks/movies_ledger.py --folder /path/to/data --width 32
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from mixfed import optim
from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.mixed import Centre, Population, gradient_1way, gradient_2way, parallel
from mixfed.algorithms.rows import exchange_rows
from mixfed.backends.simulator import Simulator
from mixfed.batches import Batching
from mixfed.core import Algorithm
from mixfed.data import FederatedData, load_source
from mixfed.data.partition import by_key
from mixfed.local import LocalTrainer, weighted
from mixfed.model import Loss, Model
from mixfed.models.recommender import DualEncoder
from mixfed.recommend import ClosedForm, hinge, spreadout_of
from mixfed.run import run

STEPS, BATCH = 10, 16
METHODS = {"parallel": parallel, "gradient_1way": gradient_1way, "gradient_2way": gradient_2way}


def people(folder: str) -> FederatedData:
    source = load_source("movielens", folder)
    assert source.natural_clients is not None
    return FederatedData.from_groups(source.train, by_key(source.natural_clients["train"]))


def made(method: str, items: int, width: int, by_pairs: bool) -> Algorithm:
    model = Model(DualEncoder(items, width), hinge)
    spread: Loss = spreadout_of("embedding.weight", 0.1, by_pairs=by_pairs)
    client = LocalTrainer(model, optim.sgd(0.5), Batching(BATCH, steps=STEPS))
    if method == "baseline":
        own, common = weighted(model.loss, 0.5), weighted(spread, 0.5)
        return fedavg(replace(client, loss=lambda p, b: own(p, b) + common(p, b)))
    centre = LocalTrainer(model, optim.sgd(0.5), Batching(1, steps=1), loss=spread)
    return exchange_rows(METHODS[method](Population(client, 0.5), Centre(centre, 0.5, needs_data=False)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--items", type=int, nargs="+", default=[3952, 10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()
    data, d = people(arguments.folder), arguments.width
    tower = 4 * (d * d + d)
    print("| rows | method | rows touched | KB measured | KB Table 12 | MFLOP measured | MFLOP regulariser, Table 12 |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for items in arguments.items:
        for method in (*METHODS, "baseline", "baseline by pairs"):
            kind, by_pairs = method.removesuffix(" by pairs"), method.endswith("pairs")
            cohort = 1 if kind == "baseline" else arguments.cohort
            closed = ClosedForm(items, d, 0, STEPS, BATCH)
            if by_pairs and items > 4000:
                flops, size = 6.0 * items**2 * d * STEPS, closed.bytes(kind) + 2 * tower
                touched, note = float(items), " (computed)"
            else:
                backend = Simulator("loop", threads=1)
                ledger = run(made(kind, items, d, by_pairs), data, rounds=1, cohort=cohort, backend=backend).ledger
                flops, note = ledger["client_flops"] / cohort, ""
                size = (ledger["bytes_down"] + ledger["bytes_up"]) / cohort
                parts = {"parallel": 2, "baseline": 2}.get(kind, 3)
                extra = (parts * tower + (4 if kind == "gradient_2way" else 0)) * cohort
                per_row = 4 * d * parts + (4 if kind != "baseline" else 0)
                touched = (ledger["bytes_down"] + ledger["bytes_up"] - extra) / per_row / cohort
            closed = ClosedForm(items, d, touched, STEPS, BATCH)
            print(
                f"| {items:,} | {method}{note} | {touched:,.0f} | {size / 1024:,.1f} |"
                f" {closed.bytes(kind) / 1024:,.1f} | {flops / 1e6:,.3f} | {closed.regulariser(kind) / 1e6:,.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
