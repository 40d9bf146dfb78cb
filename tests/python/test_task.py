"""Objects of one's own in Python: the same names, the same numbers and the same run folders as recipes have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mixfed
from tests.problems import blobs, small_mlp

SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "cohort": 4,
    "client": {"learning_rate": 0.1, "batch_size": 4, "steps": 2},
    "central": {"learning_rate": 0.1, "batch_size": 8, "steps": 2},
    "evaluate": {"every": 2},
    "simulator": {"executor": "loop"},
}


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))


def task(**more: Any) -> mixfed.Task:
    clients, centre, test = blobs(clients=12)
    return mixfed.Task(network(), clients, test, centre=centre, **(SETTINGS | more))


def test_a_task_is_trained_as_by_hand() -> None:
    """``mixfed.train`` by a name gives the very parameters of ``mixfed.run`` with the objects."""
    clients, centre, test = blobs(clients=12)
    model = mixfed.Model(network(), mixfed.cross_entropy)
    on_device = mixfed.LocalTrainer(model, mixfed.sgd(0.1), mixfed.Batching(4, steps=2))
    at_centre = mixfed.LocalTrainer(model, mixfed.sgd(0.1), mixfed.Batching(8, steps=2))
    by_hand = mixfed.run(
        mixfed.gradient_2way(on_device, at_centre), clients, central=centre, rounds=4, cohort=4,
        evaluate=mixfed.evaluator(model, test), every=2, backend=mixfed.Simulator("loop"),
    )  # fmt: skip
    result = mixfed.train(task(), "gradient_2way", progress=False)
    assert result.params.keys() == by_hand.params.keys()
    assert all(torch.equal(result.params[name], by_hand.params[name]) for name in result.params)
    assert result.metrics == by_hand.metrics


def test_an_advice_is_followed_with_its_settings() -> None:
    told = mixfed.train(task(), "fedavg", settings={"client.learning_rate": 0.001}, progress=False)
    client = SETTINGS["client"] | {"learning_rate": 0.001}
    same = mixfed.train(task(client=client), "fedavg", progress=False)
    plain = mixfed.train(task(), "fedavg", progress=False)
    assert told.metrics == same.metrics != plain.metrics


def test_a_comparison_of_ones_own(tmp_path: Path) -> None:
    """Its folder is that of the command, it can be asked for the best, and the same objects take it up again."""
    out = tmp_path / "both"
    comparison = mixfed.compare(task(), ["fedavg", "parallel", "lg_fedavg"], seeds=[0, 1], out=str(out), progress=False)
    assert (out / "comparison.json").is_file()
    assert (out / "report.html").is_file()
    means = {name: entry["metrics"]["accuracy"]["mean"] for name, entry in comparison.algorithms.items()}
    assert means[comparison.best()] == max(means.values())
    frame = comparison.frame()
    assert list(frame.index) == ["fedavg", "parallel", "lg_fedavg"]
    assert frame.loc["parallel", "accuracy"] == means["parallel"]
    assert repr(comparison).splitlines()[0].split() == ["method", "loss", "accuracy", "bytes"]
    assert comparison._repr_html_().count("<tr>") == 4
    before = (out / "fedavg-seed0" / "model.safetensors").stat().st_mtime_ns
    mixfed.compare(task(), ["fedavg", "parallel"], seeds=[0, 1], out=out, resume=True, progress=False)
    assert (out / "fedavg-seed0" / "model.safetensors").stat().st_mtime_ns == before


def test_other_objects_are_not_taken_for_the_same(tmp_path: Path) -> None:
    """A resumed run notices that a label, a weight or the criterion is another one."""
    mixfed.train(task(), "fedavg", out=tmp_path / "run", progress=False)
    clients, centre, test = blobs(clients=12)
    clients.arrays["y"][0] = 1 - clients.arrays["y"][0]
    others = [
        mixfed.Task(network(), clients, test, centre=centre, **SETTINGS),
        mixfed.Task(nn.Linear(2, 3), *blobs(clients=12)[::2], centre=centre, **SETTINGS),
        task(criterion=halved),
    ]
    for other, kind in zip(others, ("data", "network", "criterion"), strict=True):
        with pytest.raises(mixfed.InputError, match=f"has another {kind}; give it that, or choose another folder"):
            mixfed.train(other, "fedavg", out=tmp_path / "run", resume=True, progress=False)


def halved(outputs: Tensor, batch: Any) -> Tensor:
    return mixfed.cross_entropy(outputs, batch) / 2


def test_a_criterion_of_ones_own() -> None:
    """Half the loss at twice the rate takes the same steps."""
    plain = mixfed.train(task(), "fedavg", progress=False)
    client = {"learning_rate": 0.2, "batch_size": 4, "steps": 2}
    half = mixfed.train(task(criterion=halved, client=client), "fedavg", progress=False)
    for name, x in plain.params.items():
        torch.testing.assert_close(half.params[name], x)


def right(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.argmax(-1).eq(batch["y"]).float()


def slow(trainer: mixfed.LocalTrainer, *, share: float = 1.0) -> mixfed.Algorithm:
    """FedAvg whose server goes a share of the way."""
    return mixfed.fedavg(trainer, server=mixfed.sgd(share), name="slow")


def test_metrics_and_algorithms_are_functions_too(tmp_path: Path) -> None:
    both = task(evaluate={"metrics": ["accuracy", right]}, algorithms={"slow": {"share": np.float32(0.5)}})
    found = mixfed.compare(both, ["fedavg", slow], seeds=np.arange(2), out=tmp_path / "run", progress=False)
    assert list(found.algorithms) == ["fedavg", "slow"]
    for entry in found.algorithms.values():
        assert entry["metrics"]["right"] == entry["metrics"]["accuracy"]
    whole = mixfed.train(task(), slow, progress=False)
    plain = mixfed.train(task(rounds=np.int64(SETTINGS["rounds"])), "fedavg", progress=False)
    assert all(torch.equal(whole.params[name], x) for name, x in plain.params.items())


def test_tuning_by_a_metric_of_ones_own(tmp_path: Path) -> None:
    clients, centre, test = blobs(clients=12)
    settings = SETTINGS | {"evaluate": {"metrics": [right]}}
    both = mixfed.Task(network(), clients, test, centre=centre, validation=test, **settings)
    grid = {"client.learning_rate": np.array([0.0001, 0.1])}
    found = mixfed.tune(both, [slow], grid, metric=right, out=tmp_path / "tuned", progress=False)
    assert found["algorithms"]["slow"]["best"]["settings"] == {"client.learning_rate": 0.1}


def test_a_probe_measures_a_task() -> None:
    """Clients and centre hold different classes, so parallel training alone is not advised."""
    assert mixfed.probe(task(), rounds=6, repeats=1, progress=False).algorithm != "parallel"


def test_tuning_is_on_validation_data(tmp_path: Path) -> None:
    clients, centre, test = blobs(clients=12)
    both = mixfed.Task(network(), clients, test, centre=centre, validation=test, **SETTINGS)
    grid = {"client.learning_rate": [0.0001, 0.1]}
    found = mixfed.tune(both, ["fedavg"], grid, out=tmp_path / "tuned", progress=False)
    assert found["algorithms"]["fedavg"]["best"]["settings"] == {"client.learning_rate": 0.1}
    with pytest.raises(mixfed.InputError, match="validation"):
        mixfed.tune(task(), ["fedavg"], grid, out=tmp_path / "none", progress=False)


def test_results_answer_and_tell() -> None:
    result = mixfed.train(task(), "oracle", progress=False)
    _, _, test = blobs(clients=12)
    answers = result.predict(test.arrays["x"])
    right = (answers.numpy() == test.arrays["y"]).mean()
    assert right == pytest.approx(result.metrics["accuracy"])
    assert result.predict(test, raw=True).shape == (len(test), 3)
    assert mixfed.score(result, test, ["accuracy"])["accuracy"] == pytest.approx(right)
    assert list(result.frame()["accuracy"]) == [entry["accuracy"] for entry in result.history]
    assert repr(result).startswith("Result(4 rounds; loss ")
    with pytest.raises(mixfed.InputError, match="no examples"):
        result.predict(np.zeros((0, 2), np.float32))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"network": 3}, "The network of a task is a torch.nn.Module, not a int."),
        ({"network": small_mlp()}, "A task takes the network itself"),
        ({"clients": {"x": 1}}, "The clients of a task are FederatedData, not a dict."),
        ({"data": {"source": "digits"}}, "A task makes 'data' of its objects; leave it out."),
        ({"rouns": 3}, "There is no setting 'rouns'; did you mean 'rounds'?"),
        ({"client": {"lr": 0.1}}, "There is no setting 'client.lr'; did you mean 'client.learning_rate'?"),
        ({"evaluate": {"metrics": [lambda outputs, batch: outputs]}}, "The metric is a name or a function with a name"),
        ({"names": "abc"}, "The names of the classes are a list"),
        ({"algorithm": "fedavgg"}, "There is no algorithm 'fedavgg'"),
    ],
)
def test_mistakes(given: dict[str, Any], sentence: str) -> None:
    clients, centre, test = blobs(clients=12)
    objects: dict[str, Any] = {"network": network(), "clients": clients, "test": test, "centre": centre}
    with pytest.raises(mixfed.InputError) as told:
        mixfed.train(mixfed.Task(**(objects | SETTINGS | given)), progress=False)
    assert str(told.value).startswith(sentence)
