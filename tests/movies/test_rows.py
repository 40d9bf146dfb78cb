"""Row exchange gives what full tables give, and counts what it sends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mixfed import optim
from mixfed.algorithms.fedavg import fedadam, fedavg, fedavgm, fedprox
from mixfed.algorithms.mixed import Centre, Population, gradient_1way, gradient_2way, parallel
from mixfed.algorithms.rows import exchange_rows
from mixfed.backends.simulator import Simulator
from mixfed.core import Algorithm
from mixfed.run import Result, run
from tests.movies.problem import TABLE, centre, clients, model, on_clients, regulariser

Make = Callable[[], Algorithm]


def mixed(make: Callable[..., Algorithm], optimizer: optim.Optimizer | None = None, **options: object) -> Make:
    def made() -> Algorithm:
        one = model()
        return make(
            Population(on_clients(one, optimizer), 0.5), Centre(regulariser(one), 0.5, needs_data=False), **options
        )

    return made


ALGORITHMS: dict[str, Make] = {
    "fedavg": lambda: fedavg(on_clients(model())),
    "fedavg, epochs": lambda: fedavg(on_clients(model(), epochs=2)),
    "fedavg, server rate": lambda: fedavg(on_clients(model()), server=optim.sgd(0.7)),
    "fedavg, clipped": lambda: fedavg(on_clients(model(), clip=0.05)),
    "fedavg, momentum clients": lambda: fedavg(on_clients(model(), optim.sgd(0.1, momentum=0.9))),
    "fedavg, adam clients": lambda: fedavg(on_clients(model(), optim.adam(0.02))),
    "fedavg, weight decay": lambda: fedavg(on_clients(model(), optim.sgd(0.1, weight_decay=0.1))),
    "fedprox": lambda: fedprox(on_clients(model()), mu=0.5),
    "fedavgm": lambda: fedavgm(on_clients(model())),
    "fedadam": lambda: fedadam(on_clients(model())),
    "parallel": mixed(parallel),
    "gradient_1way": mixed(gradient_1way),
    "gradient_1way, momentum clients": mixed(gradient_1way, optim.sgd(0.1, momentum=0.9)),
    "gradient_2way": mixed(gradient_2way),
    "gradient_2way, adam clients": mixed(gradient_2way, optim.adam(0.02)),
    "gradient_2way, adam at the merge": mixed(gradient_2way, merge=optim.adam(0.05)),
}


def train(algorithm: Algorithm, executor: str = "loop", *, rounds: int = 4, **options: object) -> Result:
    simulator = Simulator(executor, threads=2, **{"chunk": 3 if executor == "vmap" else None} | options)
    return run(algorithm, clients(), central=centre(), rounds=rounds, cohort=4, seed=5, backend=simulator)


def assert_same(a: Result, b: Result, tolerance: float = 1e-9) -> None:
    for name, x in a.params.items():
        torch.testing.assert_close(x, b.params[name], rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_result_is_that_of_full_tables(name: str, executor: str) -> None:
    full = train(ALGORITHMS[name]())
    # Adam turns round-off in a gradient of almost nothing into a step.
    assert_same(full, train(exchange_rows(ALGORITHMS[name]()), executor), 1e-6 if "adam clients" in name else 1e-9)
    assert not torch.equal(full.params[TABLE], model().initial()[TABLE])


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "gradient_1way"])
def test_in_place_changes_nothing_but_the_memory(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    assert_same(train(algorithm), train(exchange_rows(ALGORITHMS[name](), in_place=True), "vmap"))
    assert torch.equal(algorithm.model.initial()[TABLE], model().initial()[TABLE])
