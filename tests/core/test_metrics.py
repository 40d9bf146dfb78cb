"""Metrics against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import nn

from mixfed.core.losses import binary_cross_entropy, cross_entropy, squared_error
from mixfed.core.model import Model
from mixfed.core.private import PrivateStore
from mixfed.data.store import CentralData
from mixfed.errors import InputError
from mixfed.evaluate.metrics import accuracy, evaluator, measure

DRAW = np.random.default_rng(0)
NOBODY = PrivateStore(dict)


def examples(n: int, classes: int) -> CentralData:
    return CentralData({"x": DRAW.normal(size=(n, 4)).astype(np.float32), "y": DRAW.integers(0, classes, n)})


def outputs(model: Model, data: CentralData) -> np.ndarray:
    params = {n: x.to(model.dtype) for n, x in model.initial().items()}
    with torch.no_grad():
        return model.outputs(params, {"x": torch.from_numpy(data.arrays["x"])}, training=False).double().numpy()


@pytest.mark.parametrize("batch_size", [7, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_classes(batch_size: int, dtype: torch.dtype) -> None:
    """100 examples in batches of 7: the last one is smaller and must not weigh more."""
    data, model = examples(100, 5), Model(nn.Linear(4, 5), cross_entropy, dtype=dtype)
    found = evaluator(model, data, batch_size=batch_size)(model.initial(), NOBODY)
    logits = outputs(model, data)
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert found["loss"] == pytest.approx(reference.log_loss(data.arrays["y"], chances, labels=range(5)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(data.arrays["y"], logits.argmax(1)))


def test_one_logit() -> None:
    data, model = examples(90, 2), Model(nn.Linear(4, 1), binary_cross_entropy)
    found = evaluator(model, data, ("auc", "loss", "accuracy"), batch_size=11)(model.initial(), NOBODY)
    score, y = outputs(model, data)[:, 0], data.arrays["y"]
    assert list(found) == ["auc", "loss", "accuracy"]
    assert found["auc"] == pytest.approx(reference.roc_auc_score(y, score))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(y, score > 0))
    assert found["loss"] == pytest.approx(reference.log_loss(y, 1 / (1 + np.exp(-score))), rel=1e-5)


def test_auc_of_two_logits_is_that_of_their_difference() -> None:
    data, model = examples(90, 2), Model(nn.Linear(4, 2), cross_entropy)
    z = outputs(model, data)
    expected = reference.roc_auc_score(data.arrays["y"], z[:, 1] - z[:, 0])
    assert expected != pytest.approx(reference.roc_auc_score(data.arrays["y"], z[:, 1]), abs=1e-3)
    assert measure(model, model.initial(), data, ["auc"])["auc"] == pytest.approx(expected)


def test_auc_refuses_what_has_no_two_sides() -> None:
    model = Model(nn.Linear(4, 3), cross_entropy)
    with pytest.raises(InputError, match="one or two outputs"):
        measure(model, model.initial(), examples(20, 2), ["auc"])
    binary = Model(nn.Linear(4, 1), binary_cross_entropy)
    with pytest.raises(InputError, match="two labels"):
        measure(binary, binary.initial(), examples(20, 1), ["auc"])
    with pytest.raises(InputError, match="no metric 'f2'"):
        evaluator(binary, examples(20, 2), ["f2"])


def test_accuracy_of_sequences_and_several_labels() -> None:
    """[2, 3] labels: 3 of 3 and 1 of 3 positions right; the same for independent yes/no labels."""
    labels = torch.tensor([[0, 1, 1], [1, 0, 1]])
    logits = nn.functional.one_hot(torch.tensor([[0, 1, 1], [0, 1, 1]]), 2).float()
    assert accuracy(logits, {"y": labels}).tolist() == pytest.approx([1.0, 1 / 3])
    yes_no = torch.tensor([[-1.0, 2.0, 3.0], [-1.0, 2.0, 3.0]])
    assert accuracy(yes_no, {"y": labels}).tolist() == pytest.approx([1.0, 1 / 3])
    assert accuracy(yes_no[:, :1], {"y": labels[:, 0]}).tolist() == [1.0, 0.0]


def test_squared_error() -> None:
    data = CentralData({"x": np.eye(4, dtype=np.float32), "y": np.arange(8.0, dtype=np.float32).reshape(4, 2)})
    model = Model(nn.Linear(4, 2), squared_error)
    expected = reference.mean_squared_error(data.arrays["y"], outputs(model, data))  # the mean over both columns
    assert measure(model, model.initial(), data, ["loss"])["loss"] == pytest.approx(expected, rel=1e-5)


def test_several_sets_by_name() -> None:
    model = Model(nn.Linear(4, 3), cross_entropy)
    chat, wiki = examples(20, 3), examples(30, 3)
    both = evaluator(model, {"": chat, "wiki": wiki}, ["accuracy"])(model.initial(), NOBODY)
    assert both == {
        "accuracy": measure(model, model.initial(), chat, ["accuracy"])["accuracy"],
        "accuracy_wiki": measure(model, model.initial(), wiki, ["accuracy"])["accuracy"],
    }


def test_evaluation_uses_the_statistics_and_leaves_them() -> None:
    """In evaluation BatchNorm takes its running statistics, and a batch of one example is no trouble."""
    model = Model(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), cross_entropy)
    params = model.initial() | {"0.running_mean": torch.full((4,), 5.0)}
    data = examples(9, 3)
    first = measure(model, params, data, ["loss"], batch_size=4)
    assert measure(model, params, data, ["loss"], batch_size=1)["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert first["loss"] != pytest.approx(measure(model, model.initial(), data, ["loss"])["loss"], rel=1e-2)
    assert torch.equal(params["0.running_mean"], torch.full((4,), 5.0))


def test_nan_is_a_value_not_a_crash() -> None:
    model = Model(nn.Linear(4, 1), binary_cross_entropy)
    broken = {n: x * float("nan") for n, x in model.initial().items()}
    assert all(np.isnan(v) for v in measure(model, broken, examples(9, 2), ["loss", "auc"]).values())
