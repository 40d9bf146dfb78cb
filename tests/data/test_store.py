"""The store: grouping, splitting and files, checked on arbitrary clients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from mixfed.data import CentralData, FederatedData, spread
from mixfed.errors import InputError
from tests.work import Work

seeds = st.integers(0, 2**32)
sizes = st.lists(st.integers(0, 9), min_size=1, max_size=20)


def numbered(sizes: list[int]) -> FederatedData:
    """Clients of the given sizes whose examples are numbered through, so that each can be recognised."""
    rows = np.arange(sum(sizes))
    names = np.array([f"c{number}" for number in range(len(sizes))])
    arrays = {"x": np.stack([rows, -rows], axis=1).astype(np.float32), "y": rows}
    return FederatedData(arrays, np.cumsum([0, *sizes]), names=names)


def same(left: FederatedData, right: FederatedData) -> bool:
    return (
        np.array_equal(left.offsets, right.offsets)
        and left.arrays.keys() == right.arrays.keys()
        and all(np.array_equal(left.arrays[name], right.arrays[name]) for name in left.arrays)
        and all(left.arrays[name].dtype == right.arrays[name].dtype for name in left.arrays)
    )


@given(st.lists(st.sampled_from(["b", "a", "cc"]), min_size=1))
def test_grouping_is_stable_and_sorted_by_key(keys: list[str]) -> None:
    data = FederatedData.from_arrays({"y": np.arange(len(keys))}, keys)
    assert data.names is not None
    assert list(data.names) == sorted(set(keys))
    for number, name in enumerate(data.names):
        assert list(data.client(number)["y"]) == [row for row, key in enumerate(keys) if key == name]


def test_keys_already_in_order_are_not_copied() -> None:
    values = np.arange(5)
    assert np.shares_memory(FederatedData.from_arrays({"y": values}, [3, 3, 5, 9, 9]).arrays["y"], values)


def test_text_held_as_objects_is_a_key() -> None:
    data = FederatedData.from_arrays({"y": [1, 2, 3]}, np.array(["zoe", "al", "zoe"], dtype=object))
    assert data.names is not None
    assert list(data.names) == ["al", "zoe"]
    assert list(data.arrays["y"]) == [2, 1, 3]


def test_tensors_and_lists_are_taken() -> None:
    data = FederatedData.from_arrays({"x": torch.ones(3, 2), "y": [0, 1, 2]}, torch.tensor([1, 0, 1]))
    assert data.arrays["x"].dtype == np.float32
    assert list(data.arrays["y"]) == [1, 0, 2]


@given(sizes, seeds)
def test_groups_and_keys_agree(sizes: list[int], seed: int) -> None:
    sizes = [*sizes, 1]
    owners = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    arrays = {"y": np.arange(len(owners))}
    groups = [np.flatnonzero(owners == client) for client in np.unique(owners)]
    assert same(FederatedData.from_groups(arrays, groups), FederatedData.from_arrays(arrays, owners))


def test_rows_in_no_group_are_left_out() -> None:
    data = FederatedData.from_groups({"y": np.arange(10)}, [np.array([7, 3]), np.array([], int), np.array([0])])
    assert list(data.arrays["y"]) == [7, 3, 0]
    assert list(data.sizes()) == [2, 0, 1]


class Pairs(Dataset):  # type: ignore[type-arg]
    def __init__(self, arrays: dict[str, np.ndarray], as_mapping: bool) -> None:
        self.arrays, self.as_mapping = arrays, as_mapping

    def __len__(self) -> int:
        return len(self.arrays["y"])

    def __getitem__(self, row: int) -> object:
        example = {name: array[row] for name, array in self.arrays.items()}
        return example if self.as_mapping else tuple(example.values())


@given(sizes.filter(any), st.sampled_from(["mapping", "tuple", "tensors", "examples", "mappings"]))
def test_datasets_are_clients_one_after_the_other(sizes: list[int], kind: str) -> None:
    data = numbered(sizes)
    make = {
        "mapping": lambda part: part,
        "tuple": lambda part: (part["x"], part["y"]),
        "tensors": lambda part: TensorDataset(torch.from_numpy(part["x"]), torch.from_numpy(part["y"])),
        "examples": lambda part: Pairs(part, as_mapping=False),
        "mappings": lambda part: Pairs(part, as_mapping=True),
    }[kind]
    parts = [make(data.client(client)) for client in range(len(data))]
    assert same(FederatedData.from_datasets(parts), data)


@given(sizes)
def test_clients_are_views_of_the_store(sizes: list[int]) -> None:
    data = numbered(sizes)
    assert len(data) == data.clients == len(sizes)
    assert data.examples == sum(sizes)
    assert list(data.sizes()) == sizes
    assert list(data.sizes(np.arange(len(sizes))[::-1])) == sizes[::-1]
    assert list(data.owners()) == list(np.repeat(np.arange(len(sizes)), sizes))
    for client, size in enumerate(sizes):
        part = data.client(client)
        assert len(part["y"]) == size
        assert size == 0 or np.shares_memory(part["x"], data.arrays["x"])


@given(sizes, seeds)
def test_select_keeps_order_names_and_rows(sizes: list[int], seed: int) -> None:
    data = numbered(sizes)
    chosen = np.random.default_rng(seed).permutation(len(sizes))[: max(1, len(sizes) // 2)]
    part = data.select(chosen)
    assert data.names is not None
    assert part.names is not None
    assert list(part.names) == list(data.names[chosen])
    for position, client in enumerate(chosen):
        assert np.array_equal(part.client(position)["x"], data.client(client)["x"])


@given(sizes.filter(lambda sizes: len(sizes) > 1), seeds)
def test_held_out_clients_are_others(sizes: list[int], seed: int) -> None:
    data = numbered(sizes)
    rest, held = data.hold_out(1, seed)
    assert rest.names is not None
    assert held.names is not None
    assert len(held) == 1
    assert sorted([*rest.names, *held.names]) == sorted(data.names)  # type: ignore[arg-type]
    assert sorted([*rest.arrays["y"], *held.arrays["y"]]) == list(range(data.examples))
    assert same(data.hold_out(1, seed)[1], held)


def test_hold_out_takes_a_fraction() -> None:
    rest, held = numbered([2] * 10).hold_out(0.3, seed=1)
    assert (len(rest), len(held)) == (7, 3)


parts = st.sampled_from(
    [
        {"train": 0.8, "validation": 0.1, "test": 0.1},
        {"test": 0.5, "train": 0.5},
        {"all": 1.0},
        {"a": 0.01, "b": 0.99},
    ]
)


@given(sizes, parts, seeds)
def test_split_is_disjoint_and_complete(sizes: list[int], fractions: dict[str, float], seed: int) -> None:
    data = numbered(sizes)
    split = data.split(fractions, seed)
    assert list(split) == list(fractions)
    keep = split["train" if "train" in split else next(iter(split))]
    for client in range(len(data)):
        together = np.concatenate([part.client(client)["y"] for part in split.values()])
        assert sorted(together) == list(data.client(client)["y"])
        assert len(keep.client(client)["y"]) >= min(1, sizes[client])
    for part in split.values():
        assert part.names is data.names
        assert (np.diff(part.arrays["y"]) > 0).all()
    assert all(
        same(part, again) for part, again in zip(split.values(), data.split(fractions, seed).values(), strict=True)
    )


def test_split_has_the_asked_sizes_however_small_the_clients() -> None:
    split = numbered([4] * 5000).split({"train": 0.8, "validation": 0.1, "test": 0.1}, seed=3)
    for name, expected in {"train": 16000, "validation": 2000, "test": 2000}.items():
        assert split[name].examples == pytest.approx(expected, abs=200)


def test_split_depends_on_the_seed() -> None:
    data = numbered([50] * 4)
    first, second = (data.split({"train": 0.5, "test": 0.5}, seed)["test"] for seed in (1, 2))
    assert not np.array_equal(first.arrays["y"], second.arrays["y"])


@given(sizes)
def test_empty_clients_can_be_dropped(sizes: list[int]) -> None:
    data = numbered(sizes)
    filled = data.without_empty()
    assert list(filled.sizes()) == [size for size in sizes if size]
    assert np.shares_memory(filled.arrays["x"], data.arrays["x"]) or not any(sizes)
    filled.require_no_empty_clients()


def test_an_empty_client_is_named() -> None:
    with pytest.raises(InputError, match=r"client 1 \('c1'\) has no examples, nor have 2 others; .*without_empty"):
        numbered([1, 0, 2, 0, 0]).require_no_empty_clients()


@given(sizes, st.booleans())
def test_files_give_back_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], named: bool
) -> None:
    folder = tmp_path_factory.mktemp("store") / "data"
    data = numbered(sizes)
    if not named:
        data = FederatedData(data.arrays, data.offsets)
    data.save(folder)
    opened = FederatedData.open(folder)
    assert same(opened, data)
    assert (opened.names is None) == (not named)
    assert opened.names is None or list(opened.names) == list(data.names)  # type: ignore[arg-type]
    assert all(isinstance(array, np.memmap) for array in opened.arrays.values())
    assert not opened.arrays["x"].flags.writeable


def test_a_mapped_store_can_be_used_as_any_other(tmp_path: Path) -> None:
    data = numbered([3, 1, 4])
    data.save(tmp_path / "data")
    opened = FederatedData.open(tmp_path / "data")
    assert same(opened.select([2, 0]), data.select([2, 0]))
    assert same(
        opened.split({"train": 0.5, "test": 0.5}, 1)["test"],
        data.split({"train": 0.5, "test": 0.5}, 1)["test"],
    )
    assert opened.pooled().arrays["y"].sum() == data.arrays["y"].sum()


def test_central_data_splits_and_saves(tmp_path: Path) -> None:
    data = CentralData.from_arrays({"x": torch.arange(20.0), "y": list(range(20))})
    split = data.split({"train": 0.75, "test": 0.25}, seed=0)
    assert [len(part) for part in split.values()] == [15, 5]
    assert sorted(np.concatenate([part.arrays["y"] for part in split.values()])) == list(range(20))
    split["test"].save(tmp_path / "test")
    opened = CentralData.open(tmp_path / "test")
    assert isinstance(opened.arrays["x"], np.memmap)
    assert np.array_equal(opened.arrays["y"], split["test"].arrays["y"])
    assert list(data.select([3, 1]).arrays["y"]) == [3, 1]


@given(sizes.filter(any), st.integers(0, 60), seeds)
def test_spread_deals_every_central_example_in_proportion(sizes: list[int], central: int, seed: int) -> None:
    clients = numbered(sizes)
    rows = np.arange(1000, 1000 + central)
    server = CentralData({"x": np.stack([rows, -rows], axis=1).astype(np.float32), "y": rows})
    oracle = spread(server, clients, seed)
    assert sorted(oracle.arrays["y"]) == [*range(clients.examples), *rows]
    assert np.array_equal(oracle.arrays["x"][:, 0], oracle.arrays["y"].astype(np.float32))
    for client, size in enumerate(sizes):
        labels = oracle.client(client)["y"]
        assert list(labels[:size]) == list(clients.client(client)["y"])
        assert abs(len(labels) - size - size * central / sum(sizes)) < 1 + 1e-9
    assert oracle.names is clients.names
    assert same(oracle, spread(server, clients, seed))


def test_a_million_clients_open_at_once(tmp_path: Path) -> None:
    clients = 1_000_000
    data = FederatedData({"y": np.arange(2 * clients, dtype=np.int32)}, np.arange(0, 2 * clients + 1, 2))
    data.save(tmp_path / "data")
    with Work() as work:
        opened = FederatedData.open(tmp_path / "data")
        cohort = opened.select(np.arange(0, clients, 10_000))
    assert work.calls < 10_000  # none for every client
    assert work.bytes < 24 * clients  # offsets, but not a Python object for every client
    assert len(opened) == clients
    assert list(cohort.client(1)["y"]) == [20_000, 20_001]


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


x, y = np.zeros((3, 2), np.float32), np.arange(3)
wrong = {
    "no fields": (lambda: CentralData({}), "no fields"),
    "lengths": (lambda: FederatedData({"x": x, "y": y[:2]}, [0, 3]), "differ in length"),
    "text": (lambda: CentralData({"y": ["a", "b"]}), "encode it as numbers"),
    "objects": (lambda: CentralData({"y": np.array([None, 1])}), "encode it as numbers"),
    "ragged": (lambda: CentralData({"y": [[1], [1, 2]]}), "pad"),
    "bfloat16": (lambda: CentralData({"y": torch.ones(2, dtype=torch.bfloat16)}), "convert it first"),
    "number": (lambda: CentralData({"y": 3}), "single number"),
    "field name": (lambda: CentralData({"a/b": y}), "no field name"),
    "NaN offset": (lambda: FederatedData({"y": y}, [0, np.nan, 3]), "offsets must be whole numbers"),
    "shrinking": (lambda: FederatedData({"y": y}, [0, 2, 1, 3]), "client 1 has a negative size"),
    "short offsets": (lambda: FederatedData({"y": y}, [0, 2]), "offsets end at 2 but there are 3"),
    "late offsets": (lambda: FederatedData({"y": y}, [1, 3]), "start with 0"),
    "names": (lambda: FederatedData({"y": y}, [0, 3], names=["a", "b"]), "one name for each of 1 clients"),
    "float names": (lambda: FederatedData({"y": y}, [0, 3], names=[0.5]), "names of type float64"),
    "keys": (lambda: FederatedData.from_arrays({"y": y}, [0, 1]), "one key for each of 3 examples"),
    "float keys": (lambda: FederatedData.from_arrays({"y": y}, [0.0, 1.5, 2]), "whole numbers or text"),
    "no groups": (lambda: FederatedData.from_groups({"y": y}, []), "no groups"),
    "twice": (
        lambda: FederatedData.from_groups({"y": y}, [np.array([0, 1]), np.array([1])]),
        "more than one group",
    ),
    "far row": (lambda: FederatedData.from_groups({"y": y}, [np.array([3])]), "row 3 does not exist"),
    "iterable": (lambda: FederatedData.from_datasets([Endless()]), "has a length"),
    "no example": (lambda: FederatedData.from_datasets([]), "no dataset has an example"),
    "other fields": (lambda: FederatedData.from_datasets([{"x": y}, {"y": y}]), "dataset 1 has fields"),
    "other type": (lambda: FederatedData.from_datasets([{"x": y}, {"x": x}]), "field 'x' of dataset 1"),
    "entries": (lambda: FederatedData.from_datasets([(y, y, y)]), "3 entries have only 2 names"),
    "client": (lambda: numbered([1, 2]).client(2), "client 2 does not exist"),
    "negative": (lambda: numbered([1, 2]).select([-1]), "client -1 does not exist"),
    "mask": (lambda: numbered([1, 2]).select([True]), "one entry for each of 2"),
    "hold out": (lambda: numbered([1, 2]).hold_out(2, 0), "cannot hold out 2 of 2"),
    "hold out 1.5": (lambda: numbered([1, 2]).hold_out(1.5, 0), "cannot hold out 1.5 of 2"),
    "parts": (lambda: numbered([1]).split({"train": 0.5}, 0), "sum to 1"),
    "no parts": (lambda: numbered([1]).split({}, 0), "positive"),
    "empty part": (lambda: CentralData({"y": y}).split({"train": 0.9, "test": 0.1}, 0), "'test' of 3"),
    "spread": (lambda: spread(CentralData({"y": y}), numbered([2]), 0), "do not match"),
    "prepare": (lambda: spread(CentralData({"y": y}, dict), numbered([2]), 0), "different prepare"),
}


@pytest.mark.parametrize("name", wrong)
def test_wrong_input_is_one_clear_sentence(name: str) -> None:
    call, message = wrong[name]
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.*holds no stored data"):
        FederatedData.open(tmp_path / "nowhere")
    data = numbered([2, 1])
    data.save(tmp_path / "clients")
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        data.save(tmp_path / "clients")
    with pytest.raises(InputError, match=r"FederatedData\.open"):
        CentralData.open(tmp_path / "clients")
    data.pooled().save(tmp_path / "central")
    with pytest.raises(InputError, match=r"CentralData\.open"):
        FederatedData.open(tmp_path / "central")
    field = tmp_path / "clients" / "fields" / "x.npy"
    field.write_bytes(field.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"x\.npy"):
        FederatedData.open(tmp_path / "clients")
    field.write_bytes(b"")
    with pytest.raises(InputError, match=r"x\.npy"):
        FederatedData.open(tmp_path / "clients")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["central", "clients"]
