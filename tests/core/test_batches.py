"""Batches: for any clients, batch size and number of steps or epochs, the right examples in the right places."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixfed.core.batches import Batches, Batching, Plan, plan_central, plan_cohort
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError

client_sizes = st.lists(st.integers(1, 13), min_size=1, max_size=8)
batch_sizes = st.integers(0, 15)
batchings = st.one_of(
    st.builds(lambda b, k, s: Batching(b, steps=k, shuffle=s), batch_sizes, st.integers(1, 9), st.booleans()),
    st.builds(lambda b, e, s: Batching(b, epochs=e, shuffle=s), batch_sizes, st.integers(1, 3), st.booleans()),
)


def numbered(sizes: list[int]) -> FederatedData:
    """Every example is its own row number."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return FederatedData({"x": np.arange(offsets[-1])}, offsets)


def plan_of(sizes: list[int], batching: Batching, seed: int = 0, version: int = 0) -> Plan:
    return plan_cohort("clients", numbered(sizes), np.arange(len(sizes)), batching, seed, version)


def rows(batches: Batches) -> list[list[int]]:
    """The examples of every step of one client."""
    return [batch["x"].tolist() for batch, _ in batches]


@given(client_sizes, batchings)
def test_a_stream_of_whole_epochs(sizes: list[int], batching: Batching) -> None:
    data, plan = numbered(sizes), plan_of(sizes, batching)
    for i, n in enumerate(sizes):
        own = list(range(data.offsets[i], data.offsets[i + 1]))
        steps = rows(plan.client(i))
        size = batching.batch_size or n
        per_epoch = -(-n // size)
        assert len(steps) == (batching.steps or batching.epochs * per_epoch)
        for start in range(0, len(steps), per_epoch):
            epoch = steps[start : start + per_epoch]
            whole = len(epoch) == per_epoch
            expected = [min(size, n - k * size) for k in range(len(epoch))]
            assert [len(batch) for batch in epoch] == expected
            seen = [*chain(*epoch)]
            assert sorted(seen) == own if whole else (set(seen) <= set(own) and len(set(seen)) == len(seen))
            if not batching.shuffle:
                assert seen == own[: len(seen)]


@given(client_sizes, batchings)
def test_counts(sizes: list[int], batching: Batching) -> None:
    plan = plan_of(sizes, batching)
    for i in range(len(sizes)):
        batches = plan.client(i)
        steps = rows(batches)
        assert plan.steps[i] == int(batches.steps) == len(steps) == batches.length
        assert plan.examples[i] == int(batches.examples) == sum(map(len, steps))


@given(client_sizes, batchings, st.data())
def test_a_chunk_is_its_clients_padded(sizes: list[int], batching: Batching, data: st.DataObject) -> None:
    plan = plan_of(sizes, batching)
    start = data.draw(st.integers(0, len(sizes) - 1))
    stop = data.draw(st.integers(start + 1, len(sizes)))
    chunk = plan.chunk(slice(start, stop))
    length, width = chunk.fields["x"].shape[1:3]
    mask = torch.ones(stop - start, length, width, dtype=torch.bool) if chunk.mask is None else chunk.mask
    active = torch.ones(stop - start, length, dtype=torch.bool) if chunk.active is None else chunk.active
    assert torch.equal(active, mask.any(dim=2))
    for i in range(start, stop):
        alone, j = plan.client(i), i - start
        assert int(active[j].sum()) == alone.length
        padded = [chunk.fields["x"][j, k][mask[j, k]].tolist() for k in range(alone.length)]
        assert padded == rows(alone)
        for part in ("key", "steps", "examples"):
            assert torch.equal(getattr(chunk, part)[j], getattr(alone, part))


@given(client_sizes, batchings, st.integers(0, 3))
def test_a_client_does_not_see_the_rest_of_the_cohort(sizes: list[int], batching: Batching, version: int) -> None:
    data = numbered(sizes)
    together = plan_cohort("clients", data, np.arange(len(sizes)), batching, 1, version)
    for i in range(len(sizes)):
        alone = plan_cohort("clients", data, np.array([i]), batching, 1, version)
        assert rows(alone.client(0)) == rows(together.client(i))
        assert torch.equal(alone.client(0).key, together.client(i).key)


def test_orders_differ_between_clients_rounds_epochs_seeds_and_sources() -> None:
    data, two = numbered([40, 40]), np.array([0, 1])

    def order(source: str = "clients", seed: int = 0, version: int = 0) -> list[list[int]]:
        plan = plan_cohort(source, data, two, Batching(0, epochs=2), seed, version)
        return [[x % 40 for x in batch] for i in (0, 1) for batch in rows(plan.client(i))]

    seen = [*order(), *order(version=1), *order(seed=1), *order(source="others")]
    assert len({tuple(o) for o in seen}) == len(seen)


def test_shuffles_are_fair() -> None:
    """2,000 clients of four examples: each of the 24 orders comes up 83 ± 5·9 times."""
    plan = plan_of([4] * 2000, Batching(0, epochs=1))
    orders = Counter(tuple(x % 4 for x in rows(plan.client(i))[0]) for i in range(2000))
    assert len(orders) == 24
    assert max(abs(count - 2000 / 24) for count in orders.values()) < 45


def test_steps_have_keys_of_their_own() -> None:
    keys = [int(batch["key"]) for i in (0, 1) for batch, _ in plan_of([3, 3], Batching(1, steps=4)).client(i)]
    assert len(set(keys)) == 8


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(0, 13), st.integers(1, 7), st.booleans())
def test_the_centre_goes_through_its_data_across_rounds(n: int, size: int, steps: int, shuffle: bool) -> None:
    data = CentralData({"x": np.arange(n)})
    batching = Batching(size, steps=steps, shuffle=shuffle)
    stream: list[list[int]] = []
    for version in range(8):
        batches = plan_central("centre", data, batching, 0, version).client(0)
        assert batches.length == steps
        assert int(batches.examples) == sum(len(b) for b in rows(batches))
        stream += rows(batches)
    per_epoch = -(-n // (size or n)) if size < n else 1
    for start in range(0, len(stream) - per_epoch + 1, per_epoch):
        epoch = [*chain(*stream[start : start + per_epoch])]
        assert sorted(epoch) == list(range(n))
        if not shuffle:
            assert epoch == list(range(n))


def test_the_centre_by_epochs() -> None:
    data = CentralData({"x": np.arange(5)})
    steps = rows(plan_central("centre", data, Batching(2, epochs=2), 0, 3).client(0))
    assert [len(s) for s in steps] == [2, 2, 1, 2, 2, 1]
    assert sorted(chain(*steps)) == sorted([*range(5)] * 2)


@pytest.mark.parametrize(
    ("size", "steps", "epochs"), [(1, None, None), (1, 1, 1), (-1, 1, None), (1, 0, None), (1, None, 0)]
)
def test_refusals(size: int, steps: int | None, epochs: int | None) -> None:
    with pytest.raises(InputError):
        Batching(size, steps, epochs)


def test_empty_clients_are_named() -> None:
    with pytest.raises(InputError, match="Client 1 of 'clients' has no examples"):
        plan_of([2, 0, 1], Batching(1, steps=1))
    with pytest.raises(InputError, match="'centre' is empty"):
        plan_central("centre", CentralData({"x": np.zeros((0, 2))}), Batching(1, steps=1), 0, 0)


PARTS = {
    "columns": lambda x: x[:, 2:5],
    "a column": lambda x: x[:, 3],
    "columns backwards": lambda x: x[:, ::-1],
    "every other row": lambda x: x.repeat(2, axis=0)[::2],
    "one row for all": lambda x: np.broadcast_to(x[:1], x.shape),
    "a field of records": lambda x: np.rec.fromarrays([x[:, 0], x[:, 1].astype(np.int8)], names="a,b")["a"],
    "columns that are not to be written": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape)[:, :2],
    "columns of small numbers": lambda x: x.astype(np.int16)[:, :2],
}


@pytest.mark.parametrize("part", PARTS)
def test_examples_may_be_a_part_of_another_array(part: str) -> None:
    x = PARTS[part](np.arange(60, dtype=np.float32).reshape(10, 6))
    data = FederatedData({"x": x}, np.array([0, 4, 10]))
    plan = plan_cohort("clients", data, np.array([1, 0]), Batching(2, steps=2, shuffle=False), 0, 0)
    for i, rows in enumerate([[[4, 5], [6, 7]], [[0, 1], [2, 3]]]):
        np.testing.assert_array_equal(plan.client(i).fields["x"].numpy(), np.asarray(x)[np.array(rows)])
