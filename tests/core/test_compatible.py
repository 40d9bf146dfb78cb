"""Criteria and labels that do not go together are refused before the first round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixfed.core.compatible import check_compatible
from mixfed.core.losses import binary_cross_entropy, cross_entropy, hinge, squared_error
from mixfed.core.model import Model
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData
from mixfed.errors import InputError
from mixfed.evaluate.metrics import measure
from mixfed.models.networks import CharacterGRU, mlp
from mixfed.models.parts import first_only, summed
from tests.core.helpers import averaging, clients, train

N = 40
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
TEN = np.arange(N) % 10
TWO = np.arange(N) % 2
CRITERIA = {"cross_entropy": cross_entropy, "binary": binary_cross_entropy, "squared": squared_error, "hinge": hinge}


def spoiled(place: int, value: float, labels: Any = TWO) -> Any:
    changed = labels.astype(np.float64)
    changed[place] = value
    return changed


REFUSED: list[tuple[str, int, Any, str]] = [
    ("cross_entropy", 3, TEN, "go from 0 to 9, and the model has outputs for 0 to 2 only"),
    ("cross_entropy", 10, TEN - 1, "go from -1 to 8"),
    ("cross_entropy", 10, np.eye(10)[TEN], r"have the shape \[10\] each; of one-hot labels take the argmax"),
    ("cross_entropy", 10, TEN[:, None], r"have the shape \[1\] each"),
    ("cross_entropy", 10, np.ones((N, 4)), "take a network with an answer at each position"),
    ("cross_entropy", 10, spoiled(37, 0.5), "float64 with fractions"),
    ("cross_entropy", 10, spoiled(37, np.nan), "float64 with fractions"),
    ("binary", 1, TEN, "go from 0 to 9, and binary cross-entropy knows 0 to 1; use cross_entropy for more classes"),
    ("binary", 1, 2 * TWO - 1, "go from -1 to 1"),
    ("binary", 1, spoiled(37, 0.5), "float64 with fractions"),
    ("binary", 2, TWO, "the model has 2 outputs, and the labels of the examples have 1 numbers"),
    ("binary", 2, np.eye(2)[TWO], "the model has 2 outputs, and the labels of the examples have 2 numbers"),
    ("squared", 10, TEN, r"outputs have the shape \[10\], and the labels of the examples \[\]"),
    ("squared", 1, np.ones((N, 2)), r"outputs have the shape \[1\], and the labels of the examples \[2\]"),
    ("squared", 1, spoiled(37, np.inf), "not finite"),
    ("hinge", 10, spoiled(37, 0.5), "float64 with fractions"),
    ("hinge", 10, TEN[:, None], "one item for each example"),
]


@pytest.mark.parametrize(("criterion", "outputs", "labels", "told"), REFUSED)
def test_labels_without_meaning(criterion: str, outputs: int, labels: Any, told: str) -> None:
    model = Model(mlp(3, outputs), CRITERIA[criterion])
    with pytest.raises(InputError, match=told):
        check_compatible(model, CentralData({"x": X, "y": labels}), "the examples")


@pytest.mark.parametrize(
    ("criterion", "outputs", "labels"),
    [
        ("cross_entropy", 10, TEN),
        ("cross_entropy", 10, TEN.astype(np.float32)),
        ("cross_entropy", 2, TWO.astype(bool)),
        ("binary", 1, TWO.astype(np.float32)),
        ("binary", 1, TWO[:, None]),
        ("squared", 1, TEN / 3),
        ("squared", 4, np.ones((N, 4))),
        ("hinge", 10, TEN),
    ],
)
def test_labels_that_fit(criterion: str, outputs: int, labels: Any) -> None:
    check_compatible(Model(mlp(3, outputs), CRITERIA[criterion]), CentralData({"x": X, "y": labels}), "the examples")


def test_sequences() -> None:
    model, x = Model(CharacterGRU(5, 4, 6), cross_entropy), np.zeros((N, 7), np.int64)
    check_compatible(model, CentralData({"x": x, "y": x + 4}), "the examples")
    with pytest.raises(InputError, match="a class number for each position"):
        check_compatible(model, CentralData({"x": x, "y": TWO}), "the examples")


def test_outputs_of_too_many_dimensions() -> None:
    model = Model(nn.Sequential(nn.Linear(3, 2), nn.Unflatten(1, (1, 1, 2))), cross_entropy)
    with pytest.raises(InputError, match=r"needs outputs \[batch, classes\] .* not those of shape \[batch, 1, 1, 2\]"):
        check_compatible(model, CentralData({"x": X, "y": TWO}), "the examples")


class Pair(nn.Linear):
    """A network with two answers."""

    def forward(self, x: Tensor) -> Any:
        return [super().forward(x), x]


class Unfinished(nn.Linear):
    """A network with a mistake in it."""

    def forward(self, x: Tensor) -> Any:
        return self.nosuch(x)


@pytest.mark.parametrize(
    ("network", "told"), [(Pair, "answers with a list, and"), (Unfinished, "no attribute 'nosuch'")]
)
def test_networks_that_give_no_outputs(network: type[nn.Linear], told: str) -> None:
    with pytest.raises(InputError, match=told):
        check_compatible(Model(network(3, 2), cross_entropy), CentralData({"x": X, "y": TWO}), "the examples")


def test_a_run_is_refused_before_its_first_round() -> None:
    algorithm = averaging(Model(mlp(3, 1), binary_cross_entropy))
    with pytest.raises(InputError, match="of 'clients' go from 0 to 9, and binary cross-entropy"):
        train(algorithm, clients([30, 30], (3,), 10), say=lambda line: pytest.fail(line))


@pytest.mark.parametrize("wrapped", [first_only, lambda criterion: summed(criterion, 0.5)])
def test_criteria_beside_an_auxiliary_loss(wrapped: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="go from 0 to 9"):
        check_compatible(Model(mlp(3, 2), wrapped(cross_entropy)), CentralData({"x": X, "y": TEN}), "the examples")


def test_labels_that_preparation_makes() -> None:
    """What counts are the labels of batches, on every example."""

    def halved(limit: int) -> Callable[[Batch], Batch]:
        return lambda batch: batch | {"y": (batch["y"] >= limit).long()}

    model = Model(mlp(3, 1), binary_cross_entropy)
    check_compatible(model, CentralData({"x": X, "y": TEN}, halved(5)), "the examples")

    def nearly(batch: Batch) -> Batch:
        return batch | {"y": torch.where(batch["x"][:, 0] == float(X[33, 0]), 7, (batch["y"] >= 5).long())}

    with pytest.raises(InputError, match="go from 0 to 7"):
        check_compatible(model, CentralData({"x": X, "y": TEN}, nearly), "the examples")


def test_examples_without_labels() -> None:
    with pytest.raises(InputError, match="needs labels 'y', and the examples have 'x'; name"):
        check_compatible(Model(mlp(3, 2), cross_entropy), CentralData({"x": X}), "the examples")


def test_a_criterion_of_the_users_own_is_asked_about_nothing() -> None:
    def own(outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.square().sum(1)

    check_compatible(Model(nn.Linear(3, 2), own), CentralData({"x": X}), "the examples")


@pytest.mark.parametrize("batch", [1, 5])
def test_binary_cross_entropy_of_outputs_with_and_without_a_dimension(batch: int) -> None:
    logits, labels = torch.randn(batch), torch.randint(0, 2, (batch,))
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none")
    for outputs in (logits, logits[:, None]):
        torch.testing.assert_close(binary_cross_entropy(outputs, {"y": labels}), expected)


def test_accuracy_of_one_output_needs_two_labels() -> None:
    """Nine of ten classes are above ½, so that a constant would seem to be right in 90%."""
    model = Model(mlp(3, 1), squared_error)
    with pytest.raises(InputError, match=r"labels 0 and 1; .* leave accuracy out"):
        measure(model, model.initial(), CentralData({"x": X, "y": TEN}), ["loss", "accuracy"])
    assert measure(model, model.initial(), CentralData({"x": X, "y": TEN}), ["loss"])["loss"] > 0
