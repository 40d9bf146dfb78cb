"""Metrics of classes, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mixfed
from mixfed.data.batch import Batch
from mixfed.data.meaning import Meaning
from mixfed.evaluate.metrics import Figures, accuracy
from mixfed.evaluate.spread import spread_test
from tests.problems import trainer


def figures(outputs: list[list[float]], labels: list[int], *names: str) -> dict[str, float]:
    found = Figures(mixfed.Model(nn.Linear(1, 1), mixfed.cross_entropy), names)
    for part in (slice(0, 2), slice(2, None)):  # in two batches
        found.add(torch.tensor(outputs[part]), {"y": torch.tensor(labels[part])})
    return found.result()


def wrong(outputs: Tensor, batch: Batch) -> Tensor:
    """A metric of one's own."""
    return 1 - accuracy(outputs, batch)


def test_f1_and_the_accuracy_of_classes() -> None:
    """Answers 0, 0, 1, 2, 2 to labels 0, 1, 1, 2, 0.

    Class 0: precision 1/2, recall 1/2, F1 1/2. Class 1: precision 1, recall 1/2, F1 2/3. Class 2: precision 1/2,
    recall 1, F1 2/3. Their mean is 11/18.
    """
    answers = [[9.0, 0, 0], [9.0, 0, 0], [0, 9.0, 0], [0, 0, 9.0], [0, 0, 9.0]]
    found = figures(answers, [0, 1, 1, 2, 0], "f1", "class_accuracy")
    assert found["f1"] == pytest.approx(11 / 18)
    assert [found[f"class_accuracy.{i}"] for i in range(3)] == [0.5, 0.5, 1.0]


def test_calibration() -> None:
    """Four answers with confidence 0.8 (logits ln 4 and 0), three of them right: the error is |0.8 − 0.75| = 0.05."""
    found = figures([[math.log(4), 0.0]] * 4, [0, 0, 0, 1], "calibration_error")
    assert found["calibration_error"] == pytest.approx(0.05, abs=1e-6)


def test_a_single_logit_and_answers_that_are_no_numbers() -> None:
    assert figures([[2.0], [-1.0], [3.0]], [1, 0, 0], "class_accuracy") == {
        "class_accuracy.0": 0.5, "class_accuracy.1": 1.0,
    }  # fmt: skip
    assert math.isnan(figures([[float("nan"), 0.0]] * 3, [0, 1, 1], "f1")["f1"])


def test_classes_with_names_are_called_by_them() -> None:
    model = mixfed.Model(nn.Linear(1, 1), mixfed.cross_entropy, meaning=Meaning(3, ("cat", "dog")))
    found = Figures(model, ["class_accuracy"])
    found.add(torch.tensor([[9.0, 0, 0], [9.0, 0, 0], [0, 0, 9.0]]), {"y": torch.tensor([0, 1, 2])})
    assert found.result() == {"class_accuracy.cat": 1.0, "class_accuracy.dog": 0.0, "class_accuracy.2": 1.0}


def test_a_broken_model_has_the_same_keys() -> None:
    found = figures([[float("nan"), 0.0]] * 3, [0, 1, 1], "class_accuracy", "f1")
    assert set(found) == {"class_accuracy.0", "class_accuracy.1", "f1"}
    assert all(map(math.isnan, found.values()))


def test_percentiles_over_clients() -> None:
    """A model that always answers 0: clients whose share of zeros is 0, 1/4, 1/2, 3/4 and 1."""
    labels = [np.array([0] * zeros + [1] * (4 - zeros)) for zeros in (0, 1, 2, 3, 4)]
    data = mixfed.FederatedData.from_datasets([{"x": np.ones((4, 1), np.float32), "y": y} for y in labels])
    module = nn.Linear(1, 2)
    nn.init.zeros_(module.weight)
    module.bias.data = torch.tensor([1.0, 0.0])
    model = mixfed.Model(module, mixfed.cross_entropy)
    given = ["accuracy", wrong]
    test = spread_test(mixfed.fedavg(trainer(model, 0.1)), data, given, {"local_p10": 10, "local_p50": 50})
    found = test(model.initial(), None)
    right = {"accuracy_local_p10": pytest.approx(0.1), "accuracy_local_p50": pytest.approx(0.5)}
    assert found == right | {"wrong_local_p10": pytest.approx(0.1), "wrong_local_p50": pytest.approx(0.5)}
    with pytest.raises(mixfed.InputError, match="not of 'auc'"):
        spread_test(mixfed.fedavg(trainer(model, 0.1)), data, ["auc"], {"local_p10": 10})
