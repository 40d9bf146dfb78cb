"""Distinct numbers and their places, as torch.unique has them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mixfed.transforms.rows.distinct import distinct, grouped


def check(keys: torch.Tensor) -> None:
    values, place = distinct(keys)
    expected, at = torch.unique(keys, return_inverse=True)
    assert values.dtype == expected.dtype
    assert torch.equal(values, expected)
    assert torch.equal(place, at)
    assert torch.equal(values[place], keys)


@given(st.lists(st.integers(0, 40), max_size=60), st.sampled_from([1, 10**6, 2**50]))
def test_as_torch_has_them(keys: list[int], scale: int) -> None:
    check(torch.tensor(keys, dtype=torch.int64) * scale)


@pytest.mark.parametrize("count", [1, 50, 70_000])
def test_the_places_of_every_number_in_order(count: int) -> None:
    number = torch.randint(count, (200,), generator=torch.Generator().manual_seed(0))
    order, starts = grouped(number, count)
    wanted = [(number == n).nonzero().flatten().tolist() for n in range(count)] if count < 100 else []
    assert torch.equal(number[order], number.sort().values)
    ends = [*starts[1:].tolist(), len(number)]
    assert all(order[a:b].tolist() == w for a, b, w in zip(starts.tolist(), ends, wanted, strict=False))
    assert torch.equal(torch.tensor(ends) - starts, torch.bincount(number, minlength=count))


@pytest.mark.parametrize("largest", [2**59 - 1, 2**59, 2**63 - 1])
def test_keys_that_leave_no_room_for_places(largest: int) -> None:
    """Ten keys have places of four bits, so that 59 are left."""
    check(torch.tensor([3, largest, 3, 0, largest, 1, 2, 0, 5, 5]))


def test_the_keys_are_left_alone() -> None:
    keys = torch.tensor([3, 1, 3])
    distinct(keys)
    assert keys.tolist() == [3, 1, 3]
