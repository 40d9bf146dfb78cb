"""Damaged data files: flipped bits, lost ends, swapped headers, hostile pickles and archives, values out of range."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mixfed
from mixfed.data import central_from_npz, federated_from_npz
from mixfed.errors import InputError
from tests import tiny_sources
from tests.adversarial.trial import Trial, Wrong, refusal
from tests.data.test_sources import Python2


def idx(values: np.ndarray) -> bytes:
    """Bytes in the format of MNIST."""
    return struct.pack(f">{1 + values.ndim}I", 0x800 + values.ndim, *values.shape) + values.tobytes()


def write_mnist(folder: Path, images: int = 12) -> None:
    """A small MNIST."""
    (folder / "mnist").mkdir()
    draw = np.random.default_rng(0)
    for part in ("train", "t10k"):
        pixels = draw.integers(0, 256, (images, 28, 28), np.uint8)
        (folder / "mnist" / f"{part}-images-idx3-ubyte").write_bytes(idx(pixels))
        (folder / "mnist" / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(images, dtype=np.uint8) % 10))


def write_cifar(folder: Path, images: int = 6, **changed: Any) -> None:
    """A small CIFAR-10 in its original pickles."""
    (folder / "cifar-10-batches-py").mkdir()
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batch = {
            "data": draw.integers(0, 256, (images, 3072), np.uint8), "labels": [n % 10 for n in range(images)],
            "batch_label": "one", "filenames": ["x.png"] * images,
        }  # fmt: skip
        stream = io.BytesIO()
        Python2(stream, protocol=2).dump(batch | changed)
        text = stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        (folder / "cifar-10-batches-py" / name).write_bytes(text)


def write_faces(folder: Path) -> None:
    """Small faces."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (30, 32, 32), np.uint8)
    np.savez(folder / "faces_smile_32.npz", x=pixels, smile=np.arange(30) % 2, identity=np.arange(30) // 5)


def write_movies(folder: Path) -> None:
    """A few ratings."""
    tiny_sources.write_movielens(folder, "ml-1m/ratings.dat", "::")


def write_movies_npz(folder: Path) -> None:
    """A few ratings in one archive."""
    (folder / "movielens").mkdir()
    count = np.arange(30)
    np.savez(
        folder / "movielens" / "ml-1m_ratings.npz", user_id=1 + count // 5, movie_id=1 + count, timestamp=1 + count
    )


SOURCES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "idx": ("mnist", write_mnist),
    "cifar": ("cifar10", write_cifar),
    "faces": ("faces", write_faces),
    "ratings": ("movielens", write_movies),
    "ratings in npz": ("movielens", write_movies_npz),
    "chat": ("chat-wiki", tiny_sources.write_chat_wiki),
    "vqa": ("vqa", tiny_sources.write_vqa),
}


def case(trial: Trial) -> str:
    """A source with one damaged file, or a file that must be refused."""
    if trial.draw.random() < 0.3:
        return hostile(trial)
    which = trial.one_of(list(SOURCES))
    name, write = SOURCES[which]
    write(trial.folder)
    file = trial.one_of(sorted(path for path in trial.folder.rglob("*") if path.is_file()))
    cut = damage(trial, file)
    trial.note(which, file.name)
    if which == "idx" and cut and trial.draw.random() < 0.2:
        file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes())[:-3])
        file.unlink()
    options = {"length": 10, "min_messages": 2} if which == "chat" else {}
    try:
        source = mixfed.load_source(name, trial.folder, **options)
    except InputError as error:
        return refusal(error)
    if cut and which in ("idx", "cifar", "faces", "ratings in npz"):
        raise Wrong("a file without its end was accepted")
    return sound(source.train, source.classes)


def sound(fields: Any, classes: int | None) -> str:
    """Whether what was read can be trained on."""
    if len({len(values) for values in fields.values()}) != 1:
        raise Wrong("fields differ in number")
    labels = np.asarray(fields["y"])
    if classes and labels.size and (labels.min() < -1 or labels.max() >= classes):
        raise Wrong(f"labels from {labels.min()} to {labels.max()}, and there are {classes} classes")
    if any(values.dtype.kind == "f" and not np.isfinite(values).all() for values in map(np.asarray, fields.values())):
        raise Wrong("numbers that are not finite")
    return "fine"


def damage(trial: Trial, file: Path) -> bool:
    """Damages a file; whether its end was cut off."""
    old = bytearray(file.read_bytes())
    how = trial.one_of(["flip", "flip", "head", "cut", "cut", "zero", "noise", "swap", "empty", "more"])
    trial.note(how)
    new = bytearray(old)
    if how in ("flip", "head"):
        for _ in range(trial.one_of([1, 3, 30])):
            new[trial.draw.randrange(min(len(new), 64) if how == "head" else len(new))] ^= 1 << trial.draw.randrange(8)
    elif how == "cut":
        new = new[: trial.draw.randrange(len(new))]
    elif how == "zero":
        place = trial.draw.randrange(len(new))
        new[place : place + 64] = bytes(len(new[place : place + 64]))
    elif how == "noise":
        new = bytearray(trial.draw.randbytes(len(new)))
    elif how == "swap":
        others = [path for path in trial.folder.rglob("*") if path.is_file() and path != file]
        new = bytearray(trial.one_of(sorted(others)).read_bytes()) if others else new[::-1]
    elif how == "empty":
        new = bytearray()
    else:
        new += trial.draw.randbytes(50)
    file.write_bytes(new)
    return how in ("cut", "empty")


def hostile(trial: Trial) -> str:
    """A file that was made to do harm, or whose values do not fit: it must be refused."""
    what = trial.one_of(list(HOSTILE))
    trial.note(what)
    try:
        HOSTILE[what](trial)
    except InputError as error:
        return refusal(error)
    raise Wrong("accepted")


def cifar_with(**changed: Any) -> Callable[[Trial], object]:
    """CIFAR with other values under some keys."""

    def read(trial: Trial) -> object:
        write_cifar(trial.folder, **changed)
        return mixfed.load_source("cifar10", trial.folder)

    return read


def raw_pickle(content: Callable[[Trial], bytes]) -> Callable[[Trial], object]:
    """CIFAR whose first batch is another pickle."""

    def read(trial: Trial) -> object:
        write_cifar(trial.folder)
        (trial.folder / "cifar-10-batches-py" / "data_batch_1").write_bytes(content(trial))
        return mixfed.load_source("cifar10", trial.folder)

    return read


def crafted_dtype(trial: Trial) -> bytes:
    """An array whose type has a state that NumPy does not expect."""
    kind = trial.one_of(["O8", "V8", "u1", "f8", "U3"])
    state = (
        trial.one_of([3, 4, 0, -1]), "|", None, trial.one_of([None, (b"a",), ("a",)]),
        trial.one_of([None, {}, {"a": 1}]), trial.one_of([-1, 0, 8, 2**31]), trial.one_of([-1, 0, 8]), 63,
    )  # fmt: skip
    text = pickle.dumps(np.zeros(3, np.dtype("u1")), protocol=2)
    head = text.index(b"dtype\n")
    return text[:head] + b"dtype\n" + pickle.dumps((kind, 0, 1), 2)[2:-1] + b"R" + pickle.dumps(state, 2)[2:-1] + b"b."


def huge_npz(trial: Trial) -> object:
    """An archive whose header claims 10¹² numbers."""
    head = np.lib.format.magic(1, 0)
    text = str({"descr": "<f8", "fortran_order": False, "shape": (trial.one_of([10**12, 10**30, -5]),)}).encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in ("x", "y", "client"):
            archive.writestr(f"{name}.npy", head + struct.pack("<H", len(text) + 1) + text + b"\n")
    (trial.folder / "data.npz").write_bytes(stream.getvalue())
    return federated_from_npz(trial.folder / "data.npz", "client")


def zip_bomb(trial: Trial) -> object:
    """A small archive that unpacks to gigabytes."""
    size = 6 << 30
    text = str({"descr": "|u1", "fortran_order": False, "shape": (size,)}).encode()
    file = trial.folder / "data.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
        member.write(np.lib.format.magic(1, 0) + struct.pack("<H", len(text) + 1) + text + b"\n")
        for _ in range(16):
            member.write(bytes(1 << 24))
    return central_from_npz(file)


def objects(trial: Trial) -> object:
    """An archive with pickled objects."""
    np.savez(trial.folder / "data.npz", x=np.array([{}, []], dtype=object), y=np.arange(2), client=np.arange(2))
    return federated_from_npz(trial.folder / "data.npz", "client")


HOSTILE: dict[str, Callable[[Trial], object]] = {
    "code in a pickle": raw_pickle(lambda trial: b"cos\nsystem\n(S'true'\ntR."),
    "a crafted type": raw_pickle(crafted_dtype),
    "random opcodes": raw_pickle(lambda trial: b"\x80\x02" + trial.draw.randbytes(trial.draw.randrange(1, 200)) + b"."),
    "floats from 0 to 1": cifar_with(data=np.linspace(0, 1, 6 * 3072, dtype=np.float32).reshape(6, 3072)),
    "too few numbers": cifar_with(data=np.zeros((6, 3000), np.uint8)),
    "images of no size": cifar_with(data=np.zeros((6, 31, 33, 3), np.uint8)),
    "labels that are no whole numbers": cifar_with(labels=[0.5, 1.5, 2.5, 3.5, 4.5, 5.5]),
    "labels out of range": cifar_with(labels=[0, 1, 2, 3, 4, 99]),
    "labels of text": cifar_with(labels=["a", "b", "c", "d", "e", "f"]),
    "fewer labels": cifar_with(labels=[1, 2]),
    "a huge header": huge_npz,
    "a zip bomb": zip_bomb,
    "objects": objects,
}
