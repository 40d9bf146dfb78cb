"""What row exchange costs: memory that follows the touched rows, FLOPs by hand, and the script with the ledger."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.mixed import Centre, Population, parallel
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.losses import hinge
from mixfed.core.model import Model
from mixfed.core.optim import adam, sgd
from mixfed.core.regularisers import spreadout_of
from mixfed.core.train import LocalTrainer
from mixfed.data.store import FederatedData
from mixfed.models.recommender import DualEncoder
from mixfed.transforms.rows.exchange import exchange_rows
from tests.movies.problem import ITEMS, TABLE, WIDTH, examples, model, on_clients, regulariser
from tests.movies.test_source import write_many
from tests.peak import Peak

MILLION, NARROW = 1_000_000, 4


@pytest.fixture(scope="module")
def large() -> Model:
    return Model(DualEncoder(MILLION, NARROW), hinge)


def peak_in_tables(algorithm: Algorithm, executor: str, clients: int) -> float:
    """The most memory that a round takes, all of these clients at once, in tables of a million rows."""
    draw = np.random.default_rng(0)
    data = FederatedData.from_datasets([examples(8, draw, MILLION) for _ in range(clients)])
    with Peak() as seen:
        run(algorithm, data, rounds=1, cohort=clients, backend=Simulator(executor, threads=1, chunk=clients))
    return seen.bytes / (MILLION * NARROW * 4)


MAKES: dict[str, Callable[[LocalTrainer], Algorithm]] = {
    "fedavg in place": lambda t: exchange_rows(fedavg(t), in_place=True),
    "adam clients": lambda t: exchange_rows(fedavg(replace(t, optimizer=adam(0.1)))),
    "parallel": lambda t: exchange_rows(
        parallel(t, Centre(replace(t, loss=spreadout_of(TABLE, 0.1)), needs_data=False))
    ),
}


@pytest.mark.parametrize(
    ("name", "executor"),
    [("fedavg in place", "loop"), ("fedavg in place", "vmap"), ("adam clients", "vmap"), ("parallel", "vmap")],
)
def test_memory_follows_the_touched_rows(name: str, executor: str, large: Model) -> None:
    algorithm = MAKES[name](LocalTrainer(large, sgd(0.1), Batching(4, steps=2)))
    few, many = (peak_in_tables(algorithm, executor, clients) for clients in (2, 22))
    assert many - few < 0.25  # twenty clients more, and each with a whole table would be twenty
    assert many < 12


def test_whole_tables_are_seen_in_the_same_way(large: Model) -> None:
    """So that the test above is known to see what it looks for."""
    algorithm = fedavg(LocalTrainer(large, sgd(0.1), Batching(4, steps=2)))
    few, many = (peak_in_tables(algorithm, "vmap", clients) for clients in (2, 4))
    assert many - few > 2


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_flops_of_clients_and_centre_by_hand(executor: str) -> None:
    """An example costs the hidden layer, forward 2·d² and backward 2·2·d²; spreadout UᵀU 2·N·d² and backward 4·N·d²."""
    data = FederatedData.from_datasets([examples(n, np.random.default_rng(n)) for n in (3, 6)])
    one, layer, spread = model(), 6 * WIDTH**2, 6 * ITEMS * WIDTH**2
    processed, steps, central_steps = 4 * 3 * 2, 4 * 2, 3
    centre = Centre(regulariser(one), 0.5, needs_data=False)
    mixed = exchange_rows(parallel(Population(on_clients(one), 0.5), centre))
    ledger = run(mixed, data, rounds=1, cohort=2, backend=Simulator(executor, threads=1)).ledger
    assert (ledger["client_flops"], ledger["server_flops"]) == (processed * layer, central_steps * spread)

    spreadout = spreadout_of(TABLE, 0.05)
    baseline = fedavg(replace(on_clients(one), loss=lambda p, b: one.loss(p, b) + spreadout(p, b)))
    ledger = run(baseline, data, rounds=1, cohort=2, backend=Simulator(executor, threads=1)).ledger
    assert (ledger["client_flops"], ledger["server_flops"]) == (processed * layer + steps * spread, 0)


def test_the_script_shows_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_many(tmp_path, people=8)
    file = Path(__file__).parents[2] / "benchmarks" / "movies_ledger.py"
    spec = importlib.util.spec_from_file_location("movies_ledger", file)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "movies_ledger", script)
    spec.loader.exec_module(script)
    monkeypatch.setattr("sys.argv", ["movies_ledger", "--folder", str(tmp_path), "--items", "100", "--cohort", "2"])
    script.main()
    first, second = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        for table in capsys.readouterr().out.split("\n\n")
    )
    methods = ["parallel", "gradient_1way", "gradient_2way", "baseline", "baseline by pairs"]
    assert [row[1] for row in first] == [row[0] for row in second] == methods
    assert {len(row) for row in first} == {10}
    by_name = {row[1]: row for row in first}
    touched = float(by_name["parallel"][2])
    assert 2 < touched <= 12  # a person has twelve movies
    assert by_name["parallel"][4] == f"{2 * touched * 32 * 4 / 1024:.1f}"
    assert by_name["baseline"][2] == "100"
    assert by_name["baseline"][8] == "0.0"
    assert float(by_name["baseline by pairs"][5]) > float(by_name["baseline"][5]) > float(by_name["parallel"][5]) > 0
    assert [row[2] for row in second] == ["20", "30", "30", "494", "494"]
