"""What a client of the movie recommender sends and computes in a round: measured, beside the paper's closed forms.

One round of every method on the clients of MovieLens 1M (K 10, B 16, a history of ten), with tables of 3,952 rows and,
for the same clients, of up to a million; then the paper's Table 3 (3,952 rows of 16 numbers, the FLOPs of one step).
Above 4,000 rows the baseline by pairs is computed, not run. FLOPs are those of matrix products, forward and backward,
a multiplication and an addition counting 2; the closed forms count 1 for both.

    python benchmarks/movies_ledger.py --folder /path/to/data --width 32
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.mixed import Centre, Population, gradient_1way, gradient_2way, parallel
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import optim
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.losses import hinge
from mixfed.core.model import Loss, Model
from mixfed.core.regularisers import spreadout_of
from mixfed.core.train import LocalTrainer, weighted
from mixfed.data import FederatedData, load_source
from mixfed.data.partition import by_key
from mixfed.evaluate.closed_form import ClosedForm
from mixfed.models.recommender import DualEncoder
from mixfed.transforms.rows.exchange import exchange_rows

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


@dataclass(frozen=True)
class Cost:
    """Of one client in one round, and of the server."""

    bytes: float
    rows: float
    flops: float
    server_flops: float
    measured: bool = True


def cost(method: str, data: FederatedData, items: int, width: int, cohort: int) -> Cost:
    kind, by_pairs = method.removesuffix(" by pairs"), method.endswith("pairs")
    cohort = 1 if kind == "baseline" else cohort
    tower, parts = 4 * (width * width + width), {"parallel": 2, "baseline": 2}.get(kind, 3)
    if by_pairs and items > 4000:
        size = ClosedForm(items, width, items, STEPS, BATCH).bytes(kind) + parts * tower
        return Cost(size, items, 6.0 * items**2 * width * STEPS, 0.0, measured=False)
    backend = Simulator("loop", threads=1)
    ledger = run(made(kind, items, width, by_pairs), data, rounds=1, cohort=cohort, backend=backend).ledger
    size = (ledger["bytes_down"] + ledger["bytes_up"]) / cohort
    others = parts * tower + (4 if kind == "gradient_2way" else 0)
    per_row = 4 * width * parts + (4 if kind != "baseline" else 0)
    return Cost(size, (size - others) / per_row, ledger["client_flops"] / cohort, ledger["server_flops"])


def heading(*names: str, text: int) -> str:
    """The first lines of a table whose columns are numbers but for one."""
    lines = "|".join("---" if i == text else "---:" for i in range(len(names)))
    return f"| {' | '.join(names)} |\n|{lines}|"


TABLE_12 = heading(
    *("rows", "method", "rows touched", "KB", "KB, Table 12", "client MFLOP", "client MFLOP, C.3"),
    *("of it regulariser, Table 12", "server MFLOP", "server MFLOP, Table 12"),
    text=1,
)
TABLE_3 = heading("method", "KB", "KB, Table 3", "MFLOP of a step", "MFLOP, Table 3", text=0)
PUBLISHED = {"baseline": (494, 125.16), "parallel": (20, 0.025), "gradient_1way": (30, 0.025)}
PUBLISHED["gradient_2way"] = PUBLISHED["gradient_1way"]
ALL = (*METHODS, "baseline", "baseline by pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--items", type=int, nargs="+", default=[3952, 10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()
    data, width = people(arguments.folder), arguments.width
    print(TABLE_12)
    for items in arguments.items:
        for method in ALL:
            kind, here = method.removesuffix(" by pairs"), cost(method, data, items, width, arguments.cohort)
            paper = ClosedForm(items, width, here.rows, STEPS, BATCH)
            print(
                f"| {items:,} | {method}{'' if here.measured else ' (computed)'} | {here.rows:,.0f} |"
                f" {here.bytes / 1024:,.1f} | {paper.bytes(kind) / 1024:,.1f} |"
                f" {here.flops / 1e6:,.3f} | {STEPS * paper.step_flops(kind) / 1e6:,.3f} |"
                f" {paper.regulariser(kind) / 1e6:,.1f} |"
                f" {here.server_flops / 1e6:,.1f} | {paper.server_regulariser(kind) / 1e6:,.1f} |",
                flush=True,
            )
    print(f"\n{TABLE_3}")
    for method in ALL:
        here = cost(method, data, arguments.items[0], 16, arguments.cohort)
        kilobytes, flops = PUBLISHED[method.removesuffix(" by pairs")]
        print(
            f"| {method} | {here.bytes / 1024:,.1f} | {kilobytes} | {here.flops / STEPS / 1e6:,.3f} | {flops} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
