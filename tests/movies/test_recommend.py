"""Hinge, spreadout and recall@k against slow loops; the paper's ledger against its own figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mixfed.core.losses import hinge
from mixfed.core.regularisers import spreadout, spreadout_by_pairs, spreadout_of
from mixfed.data.store import CentralData
from mixfed.errors import InputError
from mixfed.evaluate.closed_form import ClosedForm
from mixfed.evaluate.metrics import measure
from mixfed.evaluate.ranking import Recall
from tests.movies.problem import ITEMS, TABLE, examples, model


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def test_hinge_and_scores_against_a_loop() -> None:
    one = model()
    params = one.initial()
    params["embedding.weight"] = torch.randn(ITEMS, 4, dtype=torch.float64, generator=torch.manual_seed(1))
    data = examples(30, np.random.default_rng(2))
    data["x"][0] = -1  # nothing seen
    table, weight, bias = params["embedding.weight"], params["hidden.weight"], params["hidden.bias"]
    expected = []
    for seen, following in zip(data["x"], data["y"], strict=True):
        rows = [table[int(i)] for i in seen if i >= 0]
        bag = sum(rows) / len(rows) if rows else torch.zeros(4, dtype=torch.float64)
        left = [max(0.0, float(w @ bag + b)) for w, b in zip(weight, bias, strict=True)]
        score = cosine(torch.tensor(left, dtype=torch.float64), table[int(following)]) if any(left) else 0.0
        expected.append(max(0.0, 0.9 - score) ** 2)
    batch = {n: torch.from_numpy(x) for n, x in data.items()}
    for training in (True, False):  # from the score of one movie, and from the scores of all
        found = one.losses(params, batch, training=training)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("by", [spreadout, spreadout_by_pairs])
def test_spreadout_and_its_gradient_against_a_loop(by: object) -> None:
    table = torch.randn(17, 5, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
    pairs = [
        (torch.nn.functional.cosine_similarity(table[i], table[j], dim=0)) ** 2
        for i in range(17)
        for j in range(17)
        if i != j
    ]
    slow = torch.stack(pairs).sum().sqrt()
    fast = by(table)  # type: ignore[operator]
    torch.testing.assert_close(fast, slow)
    (expected,), (found,) = torch.autograd.grad(slow, [table]), torch.autograd.grad(fast, [table])
    torch.testing.assert_close(found, expected)


def test_spreadout_by_pairs_in_chunks() -> None:
    table = torch.randn(40, 3, dtype=torch.float64)
    torch.testing.assert_close(spreadout_by_pairs(table, chunk=7), spreadout(table))


def test_spreadout_at_its_ends() -> None:
    """Orthogonal rows: nothing; N equal rows: √(N² − N)."""
    assert float(spreadout(torch.eye(6, dtype=torch.float64))) < 1e-5
    assert float(spreadout(torch.ones(6, 3, dtype=torch.float64))) == pytest.approx(math.sqrt(30))
    assert torch.isfinite(torch.func.grad(spreadout)(torch.zeros(3, 2))).all()
    loss = spreadout_of(TABLE, 0.5)
    assert float(loss({TABLE: torch.ones(6, 3)}, {})) == pytest.approx(0.5 * math.sqrt(30), rel=1e-5)
    with pytest.raises(InputError, match="at least 0"):
        spreadout_of(TABLE, -1.0)


@pytest.mark.parametrize("k", [1, 5, 10])
def test_recall_against_a_brute_force_count(k: int) -> None:
    draw = np.random.default_rng(k)
    scores = draw.integers(0, 6, (200, 40)).astype(np.float64)  # many ties
    following = draw.integers(0, 40, 200)
    hits = []
    for row, movie in zip(scores, following, strict=True):
        best = sorted(range(40), key=lambda i, row=row: (-row[i], i))[:k]
        hits.append(int(movie) in best)
    found = Recall(k)(torch.from_numpy(scores), {"y": torch.from_numpy(following)})
    assert found.tolist() == [float(h) for h in hits]


@pytest.mark.parametrize("k", [1, 10, 1000])
def test_a_score_that_is_not_finite_is_never_found(k: int) -> None:
    """Rows: all scores, only the label's, another one, the label's is infinite, all is well."""
    scores = torch.tensor([[0.0, 3.0, 1.0]]).repeat(5, 1)
    scores[0] = math.nan
    scores[1, 1] = math.nan
    scores[2, 0] = math.nan
    scores[3, 1] = math.inf
    found = Recall(k)(scores, {"y": torch.ones(5, dtype=torch.int64)})
    assert found.tolist() == [0, 0, float(k > 1), 0, 1]


def test_places_are_counted_exactly_whatever_the_precision_of_scores() -> None:
    """Of 5,000 items 4,990 have a lower score: the place is 9, which a count in 16 bits would miss by dozens."""
    scores = torch.ones(1, 5000, dtype=torch.bfloat16)
    scores[0, 10], scores[0, :9], scores[0, 9] = 2.0, 3.0, 0.0
    label = {"y": torch.tensor([10])}
    assert [float(Recall(k)(scores, label)) for k in (9, 10)] == [0, 1]


@pytest.mark.parametrize("label", [-1, ITEMS])
def test_a_label_that_the_model_does_not_score(label: int) -> None:
    data = examples(4, np.random.default_rng(0))
    data["y"][2] = label
    for metric in ("loss", "recall@5"):
        with pytest.raises(InputError, match=f"label {label}, and the model scores the items 0 to {ITEMS - 1}"):
            measure(model(), model().initial(), CentralData(data), [metric])


def test_an_item_that_the_model_does_not_have_in_a_history() -> None:
    data = examples(4, np.random.default_rng(0))
    data["x"][2] = ITEMS
    with pytest.raises(InputError, match="The model cannot answer: index out of range"):
        measure(model(), model().initial(), CentralData(data), ["loss"])


def test_recall_as_a_metric_over_all_movies() -> None:
    one, data = model(), CentralData(examples(50, np.random.default_rng(0)))
    params = one.initial()
    found = measure(one, params, data, ["loss", "recall@1", "recall@5", "recall@10"], batch_size=7)
    batch = {n: torch.from_numpy(x) for n, x in data.arrays.items()}
    scores = one.outputs(params, batch, training=False)
    assert scores.shape == (50, ITEMS)
    for k in (1, 5, 10):
        top = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        assert found[f"recall@{k}"] == pytest.approx(float((top == batch["y"][:, None]).any(1).double().mean()))
    assert found["loss"] == pytest.approx(float(hinge(scores, batch).mean()))
    with pytest.raises(InputError, match="scores of all items"):
        Recall(5)(torch.zeros(3), {"y": torch.zeros(3, dtype=torch.int64)})


def test_the_closed_forms_give_table_3() -> None:
    """The paper's figures come out at d 16, n = K·B and one step; see the docstring."""
    paper = ClosedForm(items=3952, width=16, rows=160, steps=10, batch=16)
    kilobytes = {m: paper.bytes(m) / 1024 for m in ("baseline", "parallel", "gradient_1way", "gradient_2way")}
    assert kilobytes == {"baseline": 494.0, "parallel": 20.0, "gradient_1way": 30.0, "gradient_2way": 30.0}
    assert paper.step_flops("baseline") / 1e6 == pytest.approx(125.16, abs=0.005)
    assert paper.step_flops("parallel") / 1e6 == pytest.approx(0.025, abs=0.0005)
    assert 1 - paper.step_flops("parallel") / paper.step_flops("baseline") == pytest.approx(0.9998, abs=1e-4)
    assert paper.regulariser("baseline") == 10 * 3952**2 * 16 / 2
    assert paper.regulariser("gradient_2way") == 0.0
    with pytest.raises(InputError, match="no method 'fedavg'; it has baseline, parallel"):
        paper.bytes("fedavg")
