"""Readers: the same little table through every format gives the same clients."""

from __future__ import annotations

import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flwr_datasets.partitioner import IidPartitioner, NaturalIdPartitioner
from PIL import Image

from mixfed.data import CentralData, FederatedData, readers
from mixfed.errors import InputError

USERS = ["zoe", "al", "zoe", "mia", "al", "zoe"]
X = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
Y = np.arange(6)
EXPECTED = FederatedData.from_arrays({"x": X, "y": Y}, USERS)


def npz(folder: Path) -> Path:
    np.savez(folder / "data.npz", image=X, label=Y, user=np.array(USERS))
    return folder / "data.npz"


def table() -> pa.Table:
    lists = pa.array(X.tolist(), pa.list_(pa.list_(pa.float32())))
    return pa.table({"image": lists, "label": Y, "user": pa.array(USERS).dictionary_encode()})


def parquet(folder: Path) -> Path:
    pq.write_table(table(), folder / "data.parquet", row_group_size=2)
    return folder / "data.parquet"


def parquet_folder(folder: Path) -> Path:
    (folder / "parts").mkdir()
    pq.write_table(table()[:4], folder / "parts" / "0.parquet")
    pq.write_table(table()[4:], folder / "parts" / "1.parquet")
    return folder / "parts"


def dataset() -> datasets.Dataset:
    features = datasets.Features(
        {
            "image": datasets.Array2D((2, 2), "float32"),
            "label": datasets.ClassLabel(num_classes=6),
            "user": datasets.Value("string"),
        }
    )
    return datasets.Dataset.from_dict({"image": X, "label": Y, "user": USERS}, features=features)


def huggingface(folder: Path) -> Path:
    dataset().save_to_disk(folder / "saved")
    return folder / "saved"


formats = pytest.mark.parametrize(
    ("write", "kind"),
    [(npz, "npz"), (parquet, "parquet"), (parquet_folder, "parquet"), (huggingface, "huggingface")],
)
RENAME = {"x": "image", "y": "label"}


@formats
def test_every_format_gives_the_same_clients(tmp_path: Path, write: object, kind: str) -> None:
    place = write(tmp_path)  # type: ignore[operator]
    data = getattr(readers, f"federated_from_{kind}")(place, "user", RENAME)
    assert list(data.names) == ["al", "mia", "zoe"]
    assert np.array_equal(data.offsets, EXPECTED.offsets)
    for name in ("x", "y"):
        assert np.array_equal(data.arrays[name], EXPECTED.arrays[name])
    assert data.arrays["x"].dtype == np.float32
    central = getattr(readers, f"central_from_{kind}")(place, RENAME)
    assert isinstance(central, CentralData)
    assert np.array_equal(central.arrays["x"], X)
    whole = getattr(readers, f"federated_from_{kind}")(place, "user")
    assert sorted(whole.arrays) == ["image", "label"]
    assert list(getattr(readers, f"central_from_{kind}")(place, ["label"]).arrays) == ["label"]


@formats
def test_a_missing_column_is_named(tmp_path: Path, write: object, kind: str) -> None:
    place = write(tmp_path)  # type: ignore[operator]
    read = getattr(readers, f"federated_from_{kind}")
    with pytest.raises(InputError, match="has no field 'author'; it has image, label, user"):
        read(place, "author", RENAME)
    with pytest.raises(InputError, match="has no field 'author'"):
        read(place, "author")
    with pytest.raises(InputError, match="'user' is both a field and the clients' column"):
        read(place, "user", ["image", "user"])
    with pytest.raises(InputError, match=r"field 'user' .*encode it as numbers"):
        getattr(readers, f"central_from_{kind}")(place)


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_a_damaged_file_is_named(tmp_path: Path, kind: str) -> None:
    place = {"npz": npz, "parquet": parquet}[kind](tmp_path)
    whole = place.read_bytes()
    read = getattr(readers, f"central_from_{kind}")
    for damaged in (b"", b"nothing of the kind", whole[: len(whole) // 2], whole[:-1]):
        place.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"data\.{kind}' cannot be read") as caught:
            read(place)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"nowhere' does not exist"):
        read(tmp_path / "nowhere")


def test_a_damaged_dataset_is_named(tmp_path: Path) -> None:
    place = huggingface(tmp_path)
    (place / "state.json").write_text("{")
    with pytest.raises(InputError, match="saved' cannot be read"):
        readers.central_from_huggingface(place)
    with pytest.raises(InputError, match=r"nowhere' does not exist"):
        readers.central_from_huggingface(tmp_path / "nowhere")


def test_npz_refuses_objects_and_single_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", x=np.array([None, 1]))
    with pytest.raises(InputError, match=r"'x' in .*objects\.npz' holds Python objects"):
        readers.central_from_npz(tmp_path / "objects.npz")
    np.save(tmp_path / "single.npy", X)
    with pytest.raises(InputError, match=r"single\.npy' holds a single array"):
        readers.central_from_npz(tmp_path / "single.npy")


def test_gaps_and_ragged_lists_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, None, None]}), tmp_path / "gaps.parquet")
    with pytest.raises(InputError, match="column 'x' has 2 missing values"):
        readers.central_from_parquet(tmp_path / "gaps.parquet")
    pq.write_table(pa.table({"x": [[1], [2, 3]]}), tmp_path / "ragged.parquet")
    with pytest.raises(InputError, match="lists in column 'x' differ in length"):
        readers.central_from_parquet(tmp_path / "ragged.parquet")


@pytest.mark.parametrize(("mode", "shape"), [("L", (4, 1, 5, 3)), ("RGB", (4, 3, 5, 3))])
def test_images_are_decoded_with_channels_first(tmp_path: Path, mode: str, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3) if mode == "L" else (4, 5, 3, 3), np.uint8)
    saved = datasets.Dataset.from_dict(
        {"image": [Image.fromarray(image, mode) for image in pixels], "label": [1, 0, 1, 0], "user": [7, 5, 7, 5]},
        features=datasets.Features(
            {"image": datasets.Image(), "label": datasets.Value("int64"), "user": datasets.Value("int32")}
        ),
    )
    saved.save_to_disk(tmp_path / "saved")
    data = readers.federated_from_huggingface(tmp_path / "saved", "user", RENAME)
    assert data.arrays["x"].shape == shape
    assert data.arrays["x"].dtype == np.uint8
    first = pixels[1][None] if mode == "L" else pixels[1].transpose(2, 0, 1)
    assert np.array_equal(data.client(0)["x"][0], first)


def test_a_split_is_chosen(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": dataset(), "test": dataset().select([4, 0])}).save_to_disk(tmp_path / "both")
    assert list(readers.central_from_huggingface(tmp_path / "both", ["label"], split="test").arrays["label"]) == [4, 0]
    with pytest.raises(InputError, match="has the splits train, test"):
        readers.central_from_huggingface(tmp_path / "both")
    with pytest.raises(InputError, match="has no splits"):
        readers.central_from_huggingface(huggingface(tmp_path), split="train")


def test_partitions_become_clients() -> None:
    partitioner = NaturalIdPartitioner(partition_by="user")
    partitioner.dataset = dataset()
    data = readers.from_partitioner(partitioner, RENAME)
    for number in range(3):
        assert np.array_equal(data.client(number)["y"], partitioner.load_partition(number)["label"])
    assert sorted(data.arrays["y"]) == list(Y)
    assert np.array_equal(data.arrays["x"], X[data.arrays["y"]])
    even = IidPartitioner(num_partitions=2)
    even.dataset = dataset()
    assert list(readers.from_partitioner(even, ["label"]).sizes()) == [3, 3]


def test_a_partitioner_needs_a_dataset() -> None:
    with pytest.raises(InputError, match=r"set partitioner\.dataset first"):
        readers.from_partitioner(IidPartitioner(num_partitions=2))
    with pytest.raises(InputError, match="a list is no partitioner"):
        readers.from_partitioner([])


@pytest.mark.parametrize(
    ("module", "extra", "call"),
    [
        ("pyarrow.parquet", "parquet", lambda: readers.central_from_parquet("any")),
        ("datasets", "huggingface", lambda: readers.central_from_huggingface("any")),
        ("flwr_datasets.partitioner", "flower-datasets", lambda: readers.from_partitioner(None)),
    ],
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str, extra: str, call: object) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"pip install 'mixfed\[{extra}\]'"):
        call()  # type: ignore[operator]
