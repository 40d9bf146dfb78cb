"""Optimizers that remember from round to round: two rounds of one step are one round of two steps."""

from __future__ import annotations

import pytest
import torch

import mixfed
from mixfed.transforms.memory import keep_memory
from mixfed.transforms.rows.exchange import exchange_rows
from tests.problems import blobs, small_mlp, small_table

OPTIMIZERS = {"momentum": mixfed.sgd(0.1, momentum=0.9), "adam": mixfed.adam(0.05), "adagrad": mixfed.adagrad(0.05)}


def algorithm(optimizer: mixfed.Optimizer, steps: int, *, keeps: bool) -> mixfed.Algorithm:
    on_device = mixfed.LocalTrainer(small_mlp(dtype=torch.float64), optimizer, mixfed.Batching(0, steps=steps))
    plain = mixfed.fedavg(on_device)
    return keep_memory(plain, on_device) if keeps else plain


@pytest.mark.parametrize("executor", ["loop", "vmap", "factored"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rounds_go_on_where_the_last_one_ended(name: str, executor: str) -> None:
    """One client that sees all of its examples in every step, and a server that takes its model as it is: K rounds of
    one step are one round of K steps if, and only if, the optimizer remembers."""
    data = blobs(clients=1)[0]
    optimizer = OPTIMIZERS[name]

    def trained(rounds: int, steps: int, keeps: bool) -> dict[str, torch.Tensor]:
        made = algorithm(optimizer, steps, keeps=keeps)
        return mixfed.run(made, data, rounds=rounds, cohort=1, backend=mixfed.Simulator(executor)).params

    whole, kept, forgotten = trained(1, 3, False), trained(3, 1, True), trained(3, 1, False)
    for leaf, x in whole.items():
        torch.testing.assert_close(kept[leaf], x)
    assert any((forgotten[leaf] - x).abs().max() > 1e-4 for leaf, x in whole.items())


def test_executors_agree_on_ragged_clients() -> None:
    data = blobs(clients=12)[0]
    found = [
        mixfed.run(
            algorithm(OPTIMIZERS["adam"], 2, keeps=True), data, rounds=3, cohort=12, backend=mixfed.Simulator(executor)
        ).params
        for executor in ("loop", "vmap", "factored")
    ]
    for leaf, x in found[0].items():
        torch.testing.assert_close(found[1][leaf], x)
        torch.testing.assert_close(found[2][leaf], x)


def test_what_cannot_be_kept() -> None:
    on_device = mixfed.LocalTrainer(small_mlp(), mixfed.sgd(0.1), mixfed.Batching(2, steps=1))
    with pytest.raises(mixfed.InputError, match="remembers nothing"):
        keep_memory(mixfed.fedavg(on_device), on_device)
    by_rows = mixfed.LocalTrainer(small_table(), OPTIMIZERS["adam"], mixfed.Batching(2, steps=1))
    with pytest.raises(mixfed.InputError, match="put exchange_rows around"):
        keep_memory(exchange_rows(mixfed.fedavg(by_rows)), by_rows)
