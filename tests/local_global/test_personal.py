"""Local test and new test: streamed over clients, equal to the naive computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mixfed.algorithms.baselines import local
from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.local_global import local_global
from mixfed.algorithms.registry import ALGORITHMS
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.loop import Result
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.private import PrivateStore
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.data.store import CentralData
from mixfed.evaluate import many
from mixfed.evaluate.metrics import measure
from mixfed.evaluate.personal import average, averaged_test, local_test, new_test
from tests.algorithms.test_table import FEDERATED, TEST, head, setup, train
from tests.peak import Peak

ROWS = ["fedavg", "local", "mtl", "lg", "lg, warm start"]


def trained(row: str) -> tuple[Algorithm, Result]:
    base = fedavg(setup().client)
    algorithm = {
        "lg": local_global(base, head),
        "lg, warm start": local_global(base, head, warm_start=4),
    }.get(row) or ALGORITHMS[row].make(setup())
    return algorithm, train(algorithm)


def own_models(algorithm: Algorithm, result: Result) -> dict[int, Params]:
    """Every client's model, put together by hand."""
    assert result.privates is not None
    found = {}
    for client, private in result.privates.items("clients"):
        found[client] = private["params"] if "params" in private else result.params | private.get("local", {})
    return found


def logits(algorithm: Algorithm, params: Params, data: CentralData) -> torch.Tensor:
    batch = {n: torch.from_numpy(x) for n, x in data.arrays.items()}
    with torch.no_grad():
        outputs: torch.Tensor = algorithm.model.outputs(params, batch, training=False)
    return outputs


@pytest.mark.parametrize("row", ROWS)
def test_streamed_new_test_is_the_naive_ensemble(row: str) -> None:
    algorithm, result = trained(row)
    found = new_test(algorithm, TEST, ["loss", "accuracy"])(result.params, result.privates)  # type: ignore[arg-type]
    models = list(own_models(algorithm, result).values()) or [result.params]
    mean = torch.stack([logits(algorithm, m, TEST) for m in models]).mean(0)
    labels = torch.from_numpy(TEST.arrays["y"])
    assert found["accuracy_new"] == pytest.approx(float((mean.argmax(1) == labels).float().mean()))
    assert found["loss_new"] == pytest.approx(float(torch.nn.functional.cross_entropy(mean, labels)), rel=1e-5)


@pytest.mark.parametrize("row", ROWS)
def test_averaged_weights_are_the_naive_mean(row: str) -> None:
    algorithm, result = trained(row)
    models = list(own_models(algorithm, result).values()) or [result.params]
    mean = {n: torch.stack([m[n] for m in models]).mean(0) for n in result.params}
    for name, x in average(algorithm.personal, result.params, result.privates).items():  # type: ignore[arg-type]
        torch.testing.assert_close(x, mean[name], rtol=1e-6, atol=1e-6)
    found = averaged_test(algorithm, TEST)(result.params, result.privates)  # type: ignore[arg-type]
    assert found["accuracy_averaged"] == measure(algorithm.model, mean, TEST, ["accuracy"])["accuracy"]


@pytest.mark.parametrize("row", ROWS)
def test_local_test_weighs_examples(row: str) -> None:
    algorithm, result = trained(row)
    right, count = 0.0, 0
    own = own_models(algorithm, result)
    for client in range(len(FEDERATED)):
        data = CentralData(FEDERATED.client(client))
        answer = logits(algorithm, own.get(client, result.params), data).argmax(1).numpy()
        right += float((answer == data.arrays["y"]).sum())
        count += len(answer)
    found = local_test(algorithm, FEDERATED)(result.params, result.privates)  # type: ignore[arg-type]
    assert found["accuracy_local"] == pytest.approx(right / count)


def test_local_test_of_some_clients() -> None:
    algorithm, result = trained("lg")
    both = [
        local_test(algorithm, FEDERATED, ["loss"], clients=c, name="some")(result.params, result.privates)["loss_some"]  # type: ignore[arg-type]
        for c in (np.arange(4), np.arange(4, len(FEDERATED)))
    ]
    whole = local_test(algorithm, FEDERATED, ["loss"])(result.params, result.privates)["loss_local"]  # type: ignore[arg-type]
    sizes = FEDERATED.sizes()
    assert whole == pytest.approx(np.average(both, weights=[sizes[:4].sum(), sizes[4:].sum()]))


def private_models(clients: int, dtype: torch.dtype) -> tuple[Algorithm, PrivateStore]:
    """Local only on a linear model, and clients whose models differ."""
    model = Model(torch.nn.Linear(4, 3), cross_entropy, dtype=dtype)
    algorithm = local(LocalTrainer(model, sgd(0.1), Batching(0, steps=1)))
    privates = PrivateStore(lambda: algorithm.own.first(model.initial()))
    draw = torch.Generator().manual_seed(0)
    for client in range(clients):
        own = {n: torch.rand(x.shape, generator=draw).to(dtype) for n, x in model.initial().items()}
        privates.put("clients", client, {"params": own})
    return algorithm, privates


def test_the_mean_of_many_models_in_half_precision_is_their_mean() -> None:
    """A sum of 1,000 numbers of 8 bits would stop growing."""
    algorithm, privates = private_models(1000, torch.bfloat16)
    mean = average(algorithm.personal, algorithm.model.initial(), privates)
    kept = [p["params"]["weight"].double() for _, p in privates.items("clients")]
    torch.testing.assert_close(mean["weight"].double(), torch.stack(kept).mean(0), rtol=1e-3, atol=1e-3)


def test_memory_of_the_new_test_does_not_grow_with_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "ROWS", 500)  # ten models answer 50 examples together
    peaks = []
    data = CentralData.from_arrays({"x": np.zeros((50, 4), np.float32), "y": np.zeros(50, np.int64)})
    for clients in (30, 600):
        algorithm, privates = private_models(clients, torch.float32)
        params = algorithm.model.initial()
        with Peak() as peak:
            new_test(algorithm, data)(params, privates)
            averaged_test(algorithm, data)(params, privates)
        peaks.append(peak.bytes)
    assert peaks[1] < 1.5 * peaks[0]
