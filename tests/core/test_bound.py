"""Updates that are finite but absurd: reported with the client that sent them, and dropped where there is a bound."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mixfed.algorithms.asynchronous import ca2fl, fedbuff
from mixfed.algorithms.baselines import center
from mixfed.algorithms.fedavg import fedavg
from mixfed.backends.loopback import Loopback
from mixfed.backends.run import run
from mixfed.backends.simulator import Simulator
from mixfed.backends.work import norm_of, norms_of
from mixfed.core.algorithm import Algorithm, Upload
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.delays import HalfNormal
from mixfed.core.faults import Faults, told
from mixfed.core.loop import Result
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.schedule import Schedule
from mixfed.errors import InputError, RunStopped
from mixfed.transforms import bounded, compress, quantize
from mixfed.transforms.rows.exchange import exchange_rows
from tests.core.helpers import assert_close, assert_equal, averaging, clients, train
from tests.problems import Point, blobs, half_square, point, small_table, targets, trainer

GOOD = [[[1.0], [2.0]], [[5.0]], [[-3.0], [0.0], [4.0]]]
WITH_BAD = targets(GOOD[0], [[1e30]], *GOOD[1:])
BACKENDS = ["loop", "vmap", "loopback"]


def on(backend: str, algorithm: Algorithm, data: Any, **options: Any) -> Result:
    engine = Loopback() if backend == "loopback" else Simulator(backend, threads=1)
    return run(algorithm, data, **{"rounds": 3, "cohort": len(data), "seed": 5, "backend": engine} | options)


@pytest.mark.parametrize("make", [fedavg, partial(ca2fl, buffer=4)], ids=["sum", "each"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_beyond_the_bound_is_dropped_and_the_others_are_averaged(backend: str, make: Any) -> None:
    algorithm = make(trainer(point([0.5]), 0.5, steps=2))
    result = on(backend, bounded(algorithm, 10.0), WITH_BAD)
    assert result.dropped == 3
    assert [(f.kind, f.client, f.times) for f in result.faults] == [("beyond the bound", 1, 3)]
    if make is fedavg:  # CA2FL tells clients apart by their number
        assert_close(result.params, on(backend, algorithm, targets(*GOOD)).params, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_bound_it_counts_and_is_reported(backend: str) -> None:
    """1.0, 3.0, …: the changes are ½·|a − w| of each client; the median of 0.5, 2.25, 0.08 and 5e29 is 0.5."""
    result = on(backend, fedavg(trainer(point([0.5]), 0.5)), WITH_BAD, rounds=1)
    (fault,) = result.faults
    assert (fault.kind, fault.source, fault.client, fault.times, fault.round) == ("absurd", "clients", 1, 1, 1)
    assert fault.norm == pytest.approx(5e29)
    assert fault.typical == pytest.approx(0.5)
    assert result.dropped == 0
    assert float(result.params["w"]) > 1e28
    (sentence,) = told(result.faults)
    assert sentence == (
        "1 client update was more than 1,000 times as long as the median of its round: client 1 of 'clients' (1)."
    )


def test_a_run_that_one_client_has_spoilt_names_it_and_offers_a_bound() -> None:
    """The model is at 1e30·1.5²⁰ or so after the first round, and out of float32's range two rounds later.

    The median of the first round is the third smallest of 1·1.5²⁰ to 5·1.5²⁰ and the bad one: 3·3326, rounded to 1e4.
    """
    data = targets([[1e30]], *[[[float(i)]] for i in range(1, 6)])
    model = Model(Point([0.0]).float(), half_square)
    sentence = r"; client 0 of 'clients' had sent .* median of round 1, so bound the norm of updates, at 100000 say\.$"
    with pytest.raises(RunStopped, match=sentence):
        train(fedavg(trainer(model, 2.5, steps=20)), data, rounds=9)


def test_faults_are_those_of_an_unbroken_run_after_a_resume(tmp_path: Path) -> None:
    """Also where the median needs the updates of rounds before: one client a round."""
    algorithm = fedavg(trainer(point([0.5]), 0.5))
    data = targets([[1.0]], [[2.0]], [[1e12]], [[3.0]], [[1.5]])
    whole = train(algorithm, data, rounds=12, cohort=1)
    assert {f.kind for f in whole.faults} == {"absurd"}
    for rounds in (5, 12):
        resumed = train(algorithm, data, rounds=rounds, cohort=1, checkpoints=Checkpoints(tmp_path), resume=rounds > 5)
    assert resumed.faults == whole.faults


def test_a_bound_means_the_same_everywhere() -> None:
    """Late clients that exchange rows, with weight decay (which moves padding too), and a bound in the middle."""
    federated, *_ = blobs()
    schedule = Schedule(4, delays=HalfNormal(1.0), late="use")
    local = trainer(small_table(), 0.1, steps=3, batch=3, optimizer=sgd(0.1, weight_decay=0.3))
    algorithm = bounded(exchange_rows(fedbuff(local, buffer=2)), 0.61)
    loop, vmap, wire = (on(b, algorithm, federated, rounds=6, schedule=schedule) for b in BACKENDS)
    assert 2 <= loop.dropped < 15
    assert [(f.client, f.times) for f in loop.faults] == [(f.client, f.times) for f in vmap.faults]
    assert loop.faults == wire.faults
    assert_equal(loop.params, wire.params)
    assert_close(loop.params, vmap.params)


@pytest.mark.parametrize("bound", [None, 100.0])
def test_in_factors_too(bound: float | None) -> None:
    """A device far from the few whose norms are looked at first; the median is that of the few."""
    data = clients([6] * 40, (300,))
    data.arrays["x"][6 * 30 : 6 * 31] *= 1e7
    algorithm = averaging(Model(nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 2)), cross_entropy))
    algorithm = bounded(algorithm, bound) if bound else algorithm
    found = {e: train(algorithm, data, e, rounds=1) for e in ("vmap", "factored")}
    ((fault,), (expected,)) = (result.faults for result in found.values())
    assert (fault.kind, fault.client, fault.times) == (expected.kind, 30, expected.times)
    assert fault.norm == pytest.approx(expected.norm, rel=1e-3)
    assert fault.kind == ("beyond the bound" if bound else "absurd")
    assert_close(found["vmap"].params, found["factored"].params, 1e-3)


def test_what_travels_encoded_is_measured_decoded() -> None:
    algorithm = compress(fedavg(trainer(point([0.5]), 0.5)), upload={"delta": quantize(8)})
    assert on("loop", bounded(algorithm, 10.0), WITH_BAD).dropped == 3


def test_norms() -> None:
    """3-4-12 over two leaves; squares that float32 cannot hold; half precision; a private part that is not finite."""
    values = {"delta": {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([12.0])}}
    weight = torch.tensor(2.0)
    assert norm_of(Upload(values, weight), {}) == pytest.approx(13.0)
    assert norm_of(Upload({"delta": {"a": torch.full((4,), 1e30)}}, weight), {}) == pytest.approx(2e30)
    assert norm_of(Upload({"delta": {"a": torch.full((400,), 200.0, dtype=torch.float16)}}, weight), {}) == 4000.0
    assert norm_of(Upload({}, weight), {}) == 0.0
    for bad in (torch.nan, torch.inf):
        spoilt = [Upload({"delta": {"a": torch.tensor([bad, 1.0])}}, weight), Upload(values, torch.tensor(bad))]
        assert not any(np.isfinite(norm_of(upload, {})) for upload in spoilt)
        assert not np.isfinite(norm_of(Upload(values, weight), {"own": {"a": torch.tensor([bad])}}))
    two = Upload({"delta": {"a": torch.tensor([[3.0, 4.0], [torch.nan, 0.0]])}}, torch.ones(2))
    assert norms_of(two, {})[0] == 5.0, "whoever else is in the chunk"


def test_what_is_compared() -> None:
    faults = Faults()
    faults.note("clients", 0, {0: 1.0, 1: 1e9}, [])
    assert [f.client for f in faults.all()] == [1], "of two, the smaller is the median"
    quiet = Faults()
    quiet.note("clients", 0, {0: 0.0, 1: 0.0, 2: 5.0}, [])
    quiet.note("clients", 1, {3: 4000.0}, [])
    assert quiet.all() == [], "updates of norm 0 say nothing, and a ratio of 800 is not absurd"


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_bounds_without_meaning(bound: float) -> None:
    with pytest.raises(InputError, match="bounded by a number above 0"):
        bounded(fedavg(trainer(point([0.5]), 0.5)), bound)


def test_an_algorithm_without_clients_has_no_updates_to_bound() -> None:
    with pytest.raises(InputError, match="center has no clients whose updates could be bounded"):
        bounded(center(trainer(point([0.5]), 0.5)), 1.0)
