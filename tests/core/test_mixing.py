"""Example transfer: central examples that are shuffled into the clients' own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixfed.core.batches import Batching, Plan, Sample, plan_cohort
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError


def mixed(sizes: list[int], available: int, sample: Sample, batching: Batching, version: int = 0) -> Plan:
    """Own examples are 0, 1, …; central ones −1, −2, …."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    data = FederatedData({"x": np.arange(offsets[-1])}, offsets)
    central = CentralData({"x": -1 - np.arange(available)})
    return plan_cohort("clients", data, np.arange(len(sizes)), batching, 0, version, sample, central)


def seen(plan: Plan, i: int) -> list[int]:
    return [int(x) for batch, _ in plan.client(i) for x in batch["x"]]


samples = st.one_of(
    st.builds(lambda r: Sample("centre", ratio=r), st.floats(0, 0.9)),
    st.builds(lambda c: Sample("centre", count=c), st.integers(0, 12)),
)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 10), samples, st.integers(0, 6))
def test_one_epoch_visits_own_and_received_once(sizes: list[int], available: int, sample: Sample, size: int) -> None:
    plan = mixed(sizes, available, sample, Batching(size, epochs=1))
    received = 0
    for i, n in enumerate(sizes):
        examples = seen(plan, i)
        own, theirs = [x for x in examples if x >= 0], [x for x in examples if x < 0]
        first = sum(sizes[:i])
        assert sorted(own) == list(range(first, first + n))
        wanted = sample.count if sample.count is not None else round(n * sample.ratio / (1 - sample.ratio))
        assert len(theirs) == len(set(theirs)) == min(wanted, available)
        received += len(theirs)
    assert plan.bytes_of_extra() == 8 * received  # int64 rows of one number


def test_half_and_half() -> None:
    """Ratio ½ sends a client as many examples as it has; ¼ of the mix is a third of the client's own."""
    assert Sample("c", ratio=0.5).sizes(np.array([3, 6]), 100).tolist() == [3, 6]
    assert Sample("c", ratio=0.25).sizes(np.array([3, 6]), 100).tolist() == [1, 2]


def test_chunk_and_client_gather_the_same() -> None:
    plan = mixed([2, 5, 3], 9, Sample("centre", count=4), Batching(3, epochs=2))
    chunk = plan.chunk(slice(0, 3))
    for i in range(3):
        real = [int(x) for k in range(int(chunk.steps[i])) for x in chunk.fields["x"][i, k][chunk.mask[i, k]]]
        assert real == seen(plan, i)


def test_samples_are_fresh_every_round_and_differ_between_clients() -> None:
    def central_part(version: int, i: int) -> frozenset[int]:
        plan = mixed([2, 2], 1000, Sample("centre", count=20), Batching(0, epochs=1), version)
        return frozenset(x for x in seen(plan, i) if x < 0)

    assert len({central_part(version, i) for version in (0, 1) for i in (0, 1)}) == 4


def test_central_examples_are_shuffled_in() -> None:
    """Not first the one kind and then the other: the first half of the mix has some of both."""
    examples = seen(mixed([50], 50, Sample("centre", count=50), Batching(10, epochs=1)), 0)
    assert 10 < sum(x < 0 for x in examples[:50]) < 40


@pytest.mark.parametrize(
    "options", [{}, {"ratio": 0.5, "count": 1}, {"ratio": 1.0}, {"ratio": -0.1}, {"ratio": float("nan")}, {"count": -1}]
)
def test_refusals(options: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Sample("centre", **options)
