"""Arithmetic on trees."""

from __future__ import annotations

import pytest
import torch

from mixfed.core import tree

A = {"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([[12.0]])}
B = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([[-1.0]])}


def listed(t: tree.Params) -> list[float]:
    return torch.cat([x.flatten() for x in t.values()]).tolist()


def test_arithmetic() -> None:
    assert listed(tree.add(A, B, 2.0)) == [5, 8, 10]
    assert listed(tree.add(A, {"y": B["y"]})) == [3, 4, 11]
    assert listed(tree.sub(A, B)) == [2, 2, 13]
    assert listed(tree.scale(A, 0.5)) == [1.5, 2, 6]
    assert listed(tree.combine([A, B, A], [1.0, -2.0, 0.5])) == [2.5, 2, 20]
    assert float(tree.dot(A, B)) == 3 + 8 - 12
    assert float(tree.norm(A)) == 13
    assert listed(tree.zeros(A)) == [0, 0, 0]


def test_stack_and_where() -> None:
    both = tree.stack([A, B])
    assert both["y"].tolist() == [[[12.0]], [[-1.0]]]
    nested = {"deep": A, "count": torch.tensor(1)}
    other = {"deep": B, "count": torch.tensor(2)}
    assert listed(tree.where(torch.tensor(False), nested, other)["deep"]) == listed(B)
    assert int(tree.where(torch.tensor(True), nested, other)["count"]) == 1


def test_a_clone_shares_nothing() -> None:
    copy = tree.clone(A)
    copy["x"] += 1
    assert A["x"].tolist() == [3.0, 4.0]


def test_cast_leaves_integers() -> None:
    cast = tree.cast({"x": torch.ones(1), "n": torch.ones(1, dtype=torch.int64)}, torch.bfloat16)
    assert [t.dtype for t in cast.values()] == [torch.bfloat16, torch.int64]


def test_leaves_and_weight() -> None:
    nested = {"a": A, "n": 3, "b": {"c": torch.zeros(3, dtype=torch.int8), "none": {}}}
    assert [tuple(x.shape) for x in tree.leaves(nested)] == [(2,), (1, 1), (3,)]
    assert tree.nbytes(nested) == 4 * 3 + 3
    doubled = tree.map_leaves(lambda x: 2 * x, nested)
    assert doubled["n"] == 3
    assert listed(doubled["a"]) == [6, 8, 24]


def test_a_name_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError):
        tree.sub(A, {"x": A["x"]})
