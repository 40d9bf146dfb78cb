"""Sources: tiny files in the formats of the real ones, and what is said when a file is missing or damaged."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from mixfed.data import SOURCES, FederatedData, load_source
from mixfed.data.prepare import Pixels
from mixfed.data.sources import faces
from mixfed.data.sources.base import Source
from mixfed.errors import InputError
from tests.tiny_sources import write_celeba, write_chat_wiki, write_movielens, write_vqa

random = np.random.default_rng(0)
GREY = random.integers(0, 256, (7, 28, 28), np.uint8)
COLOUR = random.integers(0, 256, (6, 3, 32, 32), np.uint8)


def write_idx(file: Path, values: np.ndarray, compress: bool = True) -> None:
    content = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape) + values.tobytes()
    file.parent.mkdir(parents=True, exist_ok=True)
    if compress:
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(content))
    else:
        file.write_bytes(content)


def write_mnist(folder: Path, name: str = "mnist", compress: bool = True) -> None:
    for part, count in (("train", 7), ("t10k", 3)):
        write_idx(folder / name / f"{part}-images-idx3-ubyte", GREY[:count], compress)
        write_idx(folder / name / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8), compress)


def write_subset(folder: Path) -> None:
    images, labels = COLOUR.transpose(0, 2, 3, 1), np.arange(6, dtype=np.uint8)
    np.savez(folder / "cifar10_subset.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    np.savez(
        folder / "cifar100_subset.npz",
        **{"x_train": images, "fine_train": labels, "coarse_train": labels // 2},
        **{"x_test": images[:2], "fine_test": labels[:2], "coarse_test": labels[:2] // 2},
    )


class Python2(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Writes text as Python 2 did, with which the original files were made."""

    def save_text(self, text: str | bytes) -> None:
        content = text if isinstance(text, bytes) else text.encode()
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    dispatch = pickle._Pickler.dispatch | {str: save_text, bytes: save_text}  # type: ignore[attr-defined]


def write_pickles(folder: Path) -> None:
    def dump(file: Path, rows: slice, *labels: str) -> None:
        file.parent.mkdir(exist_ok=True)
        batch = {"data": COLOUR[rows].reshape(-1, 3072), "batch_label": "a batch"}
        batch |= {name: list(range(6))[rows] for name in labels}
        stream = io.BytesIO()
        Python2(stream, protocol=2).dump(batch)
        file.write_bytes(stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))

    for number in range(1, 6):
        dump(folder / "cifar-10-batches-py" / f"data_batch_{number}", slice(number - 1, number), "labels")
    dump(folder / "cifar-10-batches-py" / "test_batch", slice(5, 6), "labels")
    for part in ("train", "test"):
        dump(folder / "cifar-100-python" / part, slice(0, 4), "fine_labels", "coarse_labels")


ADULT = """39, State-gov, 77516, Bachelors, 13, Single, Adm-clerical, Unmarried, White, Male, 2174, 0, 40, Cuba, <=50K
50, Private, 83311, Bachelors, 13, Married, ?, Husband, Black, Male, 0, 0, 13, Cuba, >50K
28, Private, 338409, HS-grad, 9, Married, Sales, Wife, Black, Female, 0, 0, 40, ?, <=50K

"""


def write_adult(folder: Path) -> None:
    (folder / "adult").mkdir()
    (folder / "adult" / "adult.data").write_text(ADULT)
    test = ADULT.replace("K\n", "K.\n").replace("Cuba", "Peru")
    (folder / "adult" / "adult.test.gz").write_bytes(gzip.compress(f"|1x3 Cross validator\n{test}".encode()))


def write_faces(folder: Path) -> None:
    np.savez(
        folder / "faces_smile_32.npz",
        x=random.integers(0, 256, (5, 32, 32), np.uint8),
        smile=np.array([1, 0, 1, 0, 1], np.uint8),
        identity=np.array([4, -1, 2, 4, -1], np.int16),
    )


WRITERS: dict[str, Callable[[Path], None]] = {
    "adult": write_adult,
    "celeba": write_celeba,
    "chat-wiki": write_chat_wiki,
    "cifar10": write_subset,
    "cifar100": write_subset,
    "faces": write_faces,
    "fashion-mnist": lambda folder: write_mnist(folder, "fashion-mnist"),
    "mnist": write_mnist,
    "movielens": lambda folder: write_movielens(folder, "ml-1m/ratings.dat", "::"),
    "movielens-100k": lambda folder: write_movielens(folder, "ml-100k/u.data", "\t"),
    "chat-style": write_chat_wiki,
    "vqa": write_vqa,
}
SMALL = {
    "chat-wiki": {"length": 10, "min_messages": 2},
    "chat-style": {"length": 8, "min_messages": 2},
    "vqa": {"size": 16},
}
FOLDERS = {
    "chat-wiki": "text",
    "movielens": "half of its lines are a file as well, see tests/movies",
    "movielens-100k": "the same",
    "celeba": "never damaged here, as it is Arrow's to read",
    "chat-style": "damaged as a file of chat-wiki",
}


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - {"files"}))  # of which tests/own tells
def test_every_source_is_well_formed(tmp_path: Path, name: str) -> None:
    if name != "digits":
        WRITERS[name](tmp_path)
    source = load_source(name, tmp_path, **SMALL.get(name, {}))
    assert source.description
    assert source.licence
    assert source.train.keys() == source.test.keys()
    for part in (source.train, source.test):
        assert len({len(array) for array in part.values()}) == 1
        assert part["y"].dtype == (np.uint8 if name == "chat-wiki" else np.int64)
    assert source.classes is not None
    assert source.train["y"].max() < source.classes
    if "y" in source.names:
        assert len(source.names["y"]) == source.classes
    if source.natural_clients is not None:
        assert len(source.natural_clients["train"]) == len(source.train["y"])
        FederatedData.from_arrays(source.train, source.natural_clients["train"], source.prepare)
    if source.prepare is not None:
        batch = source.prepare({"x": torch.from_numpy(source.train["x"][:2].copy()), "y": torch.zeros(2)})
        assert batch["x"].dtype == torch.float32
        assert 0 <= float(batch["x"].min()) <= float(batch["x"].max()) <= 1
        assert batch["x"].shape == ((2, 3, 16, 16) if name == "vqa" else source.train["x"][:2].shape)


def test_digits_are_split_by_class() -> None:
    source = load_source("digits")
    assert source.train["x"].shape == (1438, 64)
    assert source.test["x"].shape == (359, 64)
    assert source.train["x"].dtype == np.float32
    assert source.train["x"].max() == 1
    shares = np.bincount(source.test["y"]) / (np.bincount(source.test["y"]) + np.bincount(source.train["y"]))
    assert np.abs(shares - 0.2).max() < 0.01
    assert np.array_equal(load_source("digits").test["x"], source.test["x"])


def test_digits_are_those_of_scikit_learn() -> None:
    """They are read from its file; the order of the examples does not matter."""
    source = load_source("digits")
    x, y = (np.concatenate([part[name] for part in (source.train, source.test)]) for name in ("x", "y"))
    theirs = load_digits()
    ours, given = np.c_[x * 16, y], np.c_[theirs.data, theirs.target]
    assert np.array_equal(ours[np.lexsort(ours.T)], given[np.lexsort(given.T)])


@pytest.mark.parametrize("compress", [True, False])
def test_idx_files_plain_or_gzipped(tmp_path: Path, compress: bool) -> None:
    write_mnist(tmp_path, compress=compress)
    source = load_source("mnist", tmp_path)
    assert np.array_equal(source.train["x"], GREY[:, None])
    assert list(source.test["y"]) == [0, 1, 2]
    assert source.natural_clients is None


def test_writers_are_the_clients_of_mnist(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    writers = tmp_path / "mnist" / "mnist_writers_from_qmnist.npz"
    np.savez(writers, train_writer=np.array([9, 9, 8, 8, 8, 7, 9]), test_writer=np.array([1, 1, 2]))
    source = load_source("mnist", tmp_path)
    assert source.natural_clients is not None
    assert list(source.natural_clients["train"]) == [9, 9, 8, 8, 8, 7, 9]
    np.savez(writers, train_writer=np.array([9]), test_writer=np.array([1, 1, 2]))
    with pytest.raises(InputError, match="one writer for every image"):
        load_source("mnist", tmp_path)


def test_cifar_standardised(tmp_path: Path) -> None:
    """51/255 = 0.2 in every channel becomes (0.2 − mean)/std."""
    write_subset(tmp_path)
    for asked, wanted in ((False, [0.2] * 3), (True, [-0.2914 / 0.2470, -0.2822 / 0.2435, -0.2465 / 0.2616])):
        prepare = load_source("cifar10", tmp_path, standardised=asked).prepare
        assert prepare is not None
        assert prepare({"x": torch.full((1, 3, 1, 1), 51)})["x"].flatten().tolist() == pytest.approx(wanted)


def test_cifar_from_pickles_and_subset_are_alike(tmp_path: Path) -> None:
    write_subset(tmp_path)
    subset = load_source("cifar10", tmp_path)
    assert np.array_equal(subset.train["x"], COLOUR)
    assert "cifar10_subset.npz" in subset.description
    write_pickles(tmp_path)
    whole = load_source("cifar10", tmp_path)
    assert "cifar-10-batches-py" in whole.description
    assert np.array_equal(whole.train["x"], COLOUR[:5])
    assert list(whole.train["y"]) == list(range(5))
    assert np.array_equal(whole.test["x"], COLOUR[5:])
    hundred = load_source("cifar100", tmp_path)
    assert np.array_equal(hundred.train["x"], COLOUR[:4])
    assert list(hundred.test["coarse"]) == [0, 1, 2, 3]


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.file),)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    write_pickles(tmp_path)
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps({b"data": Evil(tmp_path / "harm")}))
    with pytest.raises(InputError, match=r"train' cannot be read .*mkdir, which no file of arrays needs"):
        load_source("cifar100", tmp_path)
    assert not (tmp_path / "harm").exists()


def test_adult_is_encoded(tmp_path: Path) -> None:
    write_adult(tmp_path)
    source = load_source("adult", tmp_path)
    columns = source.names["x"]
    x = source.train["x"]
    assert x.shape == (3, len(columns))
    assert np.allclose(x[:, :6].mean(axis=0), 0, atol=1e-6)
    assert np.allclose(x[:, columns.index("age")].std(), 1)
    assert list(x[:, columns.index("occupation=?")]) == [0, 1, 0]
    assert list(x[:, columns.index("native-country=Cuba")]) == [1, 1, 0]
    assert list(source.test["x"][:, columns.index("native-country=Peru")]) == [1, 1, 0]
    assert list(source.train["y"]) == list(source.test["y"]) == [0, 1, 0]
    assert [source.names["race"][code] for code in source.train["race"]] == ["White", "Black", "Black"]
    assert [source.names["sex"][code] for code in source.train["sex"]] == ["Male", "Male", "Female"]
    assert np.array_equal(x[:, 6:].sum(axis=1), [8, 8, 8])


def test_unknown_faces_are_dropped_or_kept(tmp_path: Path) -> None:
    write_faces(tmp_path)
    source = load_source("faces", tmp_path)
    assert source.natural_clients is not None
    assert list(source.natural_clients["train"]) == [4, 2, 4]
    assert source.train["x"].shape == (3, 1, 32, 32)
    kept = faces.load(tmp_path, keep_unknown=True)
    assert kept.natural_clients is not None
    assert list(kept.natural_clients["train"]) == [4, -1, 2, 4, -1]


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_missing_file_is_named_with_its_origin(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"is not in the data folder '.*'; get it from") as caught:
        load_source(name, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert SOURCES[name].obtain in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path)
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        whole = file.read_bytes()
        used = file.parent.name == FOLDERS.get(name, name) or file.name.startswith(f"{name}_")
        for damaged in (b"", b"something else", whole[: len(whole) // 2]):
            file.write_bytes(damaged)
            if used:
                with pytest.raises(InputError, match="cannot be read") as caught:
                    load_source(name, tmp_path, **SMALL.get(name, {}))
                assert file.name in str(caught.value)
        file.write_bytes(whole)


def test_the_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path)
    monkeypatch.setenv("MIXFED_DATA", str(tmp_path))
    assert len(load_source("mnist").train["y"]) == 7
    monkeypatch.setenv("MIXFED_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"nowhere' does not exist"):
        load_source("mnist")
    monkeypatch.delenv("MIXFED_DATA")
    with pytest.raises(InputError, match="set the environment variable MIXFED_DATA"):
        load_source("mnist")


@pytest.mark.parametrize(
    ("typed", "meant"), [("minst", "mnist"), ("FashionMNIST", "fashion-mnist"), ("cifar-10", "cifar10")]
)
def test_an_unknown_name_gets_a_suggestion(typed: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"there is no source '{typed}'; did you mean '{meant}'"):
        load_source(typed)


def test_counts_of_images_and_labels_must_agree(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte", np.zeros(5, np.uint8))
    with pytest.raises(InputError, match=r"has 7 images but .* 5 labels"):
        load_source("mnist", tmp_path)


def test_pixels_can_be_standardised() -> None:
    batch = {"x": torch.full((2, 4, 3, 5, 5), 255, dtype=torch.uint8), "y": torch.ones(2, 4)}
    prepared = Pixels(mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 2.0))(batch)
    assert torch.equal(prepared["x"][1, 3, :, 0, 0], torch.tensor([1.0, 1.0, 0.0]))
    assert prepared["y"] is batch["y"]
    assert Pixels() == Pixels()


@pytest.mark.parametrize("labels", [[0, 10], [-1, 3]])
def test_labels_that_are_no_class_are_refused(labels: list[int]) -> None:
    right, wrong = {"x": np.zeros((2, 1)), "y": np.array([0, 9])}, {"x": np.zeros((2, 1)), "y": np.array(labels)}
    for train, test, told in ((wrong, right, "training"), (right, wrong, "test")):
        with pytest.raises(InputError, match=f"The {told} labels go from {labels[0]} to {labels[1]}"):
            Source(train, test, None, 10, None, "", "")
