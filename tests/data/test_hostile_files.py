"""Files that are damaged, lie about their size or were made to do harm: one sentence, and nothing else happens."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mixfed.data import central_from_npz, load_source
from mixfed.data._arrays import whole_numbers
from mixfed.data._files import max_bytes, reading
from mixfed.data.sources.cifar import read_pickle
from mixfed.errors import InputError
from tests.tiny_sources import write_vqa

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), np.uint8)
LABELS = np.array([3, 0, 9, 1], np.uint8)


def test_thousands_of_damaged_pickles(tmp_path: Path) -> None:
    script = Path(__file__).parent / "fuzz_pickles.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "batch"), "4000", "0"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    read, refused = map(int, done.stdout.split())
    assert read + refused == 4000
    assert min(read, refused) > 20


def nested(depth: int) -> bytes:
    """A dictionary whose key is a tuple in a tuple in a tuple …"""
    return b"\x80\x02})" + b"\x85" * depth + b"K\x01s."


class Dtype:
    """A type of eight bytes that are objects, which its state keeps secret."""

    def __reduce__(self) -> Any:
        return np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)


class Pointers:
    """An array of that type, whose addresses come from the file."""

    def __reduce__(self) -> Any:
        rebuild = np.empty(0).__reduce__()[0]
        return rebuild, (np.ndarray, (0,), b"b"), (1, (2,), Dtype(), False, b"A" * 16)


HOSTILE = {
    "a crafted dtype": pickle.dumps({b"data": Pointers(), b"labels": [1]}, 4),
    "a memo of 2^32 places": b"\x80\x02}r\xff\xff\xff\xff.",
    "a string of 2^62 bytes": b"\x80\x04}\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "a key many tuples deep": nested(200_000),
    "code that is run": b"\x80\x02}U\x04datacos\nmkdir\nU\x04harm\x85Rs.",
}


def test_hostile_pickles(tmp_path: Path) -> None:
    """In a process of its own: Python's reader with NumPy's classes ends with signal 11 at some of them."""
    for number, content in enumerate(HOSTILE.values()):
        (tmp_path / str(number)).write_bytes(content)
    code = (
        "import sys, pathlib, mixfed.data.sources.cifar as c\n"
        "for file in sys.argv[1:]:\n"
        "    try: c.read_pickle(pathlib.Path(file), y='labels')\n"
        "    except c.InputError as error: print(error, flush=True)"
    )
    files = [str(number) for number in range(len(HOSTILE))]
    done = subprocess.run(
        [sys.executable, "-c", code, *files], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    told = done.stdout.splitlines()
    assert done.returncode == 0, f"{list(HOSTILE)[len(told)]}: {done.stderr[-500:]}"
    assert [line.startswith(f"'{file}' cannot be read") for file, line in zip(files, told, strict=True)] == [True] * 5
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("labels", [LABELS.tolist(), LABELS.astype(np.int64), LABELS.astype(">i2")])
@pytest.mark.parametrize("key", [str, str.encode])
def test_pickles_that_users_write(tmp_path: Path, protocol: int, labels: Any, key: Callable[[str], Any]) -> None:
    images = IMAGES.reshape(4, 3072)
    images = np.asfortranarray(images) if protocol == 3 else images
    (tmp_path / "batch").write_bytes(pickle.dumps({key("data"): images, key("labels"): labels}, protocol))
    found = read_pickle(tmp_path / "batch", y="labels")
    np.testing.assert_array_equal(found["x"], IMAGES)
    np.testing.assert_array_equal(found["y"], LABELS)


def subset(folder: Path, **changed: Any) -> Path:
    arrays = {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:2], "y_test": LABELS[:2]} | changed
    np.savez(folder / "cifar10_subset.npz", **arrays)
    return folder


def test_channels_first_and_last_are_read_alike(tmp_path: Path) -> None:
    last = IMAGES.transpose(0, 2, 3, 1)
    for images in (IMAGES, last, last.astype(np.int64)):
        source = load_source("cifar10", subset(tmp_path, x_train=images))
        np.testing.assert_array_equal(source.train["x"], IMAGES)
        assert source.train["x"].dtype == np.uint8


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"x_train": IMAGES.astype(np.float32) / 255}, "float32 and not bytes from 0 to 255"),
        ({"x_train": IMAGES.astype(np.int16) - 1}, "int16 and not bytes from 0 to 255"),
        ({"x_train": IMAGES.reshape(4, 3072)}, r"have the shape \[4, 3072\]"),
        ({"x_train": IMAGES.transpose(0, 2, 1, 3)}, r"have the shape \[4, 32, 3, 32\]"),
        ({"y_train": LABELS + 0.7}, "labels 'y' in .* must be whole numbers"),
        ({"y_train": np.array([1, 2, np.nan, 3])}, "labels 'y' in .* must be whole numbers"),
        ({"y_train": np.full(4, 2**64 - 1, np.uint64)}, "labels 'y' in .* must be whole numbers"),
        ({"y_train": np.eye(10)[LABELS]}, r"labels 'y' of shape \[4, 10\] for 4 images"),
        ({"y_train": LABELS[:3]}, r"labels 'y' of shape \[3\] for 4 images"),
    ],
)
def test_cifar_arrays_that_would_be_read_wrong(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        load_source("cifar10", subset(tmp_path, **changed))


def test_float_pickles_are_refused(tmp_path: Path) -> None:
    batch = {"data": IMAGES.reshape(4, 3072) / 255, "labels": LABELS.tolist()}
    (tmp_path / "batch").write_bytes(pickle.dumps(batch, 4))
    with pytest.raises(InputError, match="float64 and not bytes"):
        read_pickle(tmp_path / "batch", y="labels")


def test_float_faces_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "faces_smile_32.npz"
    np.savez(file, x=IMAGES[:, 0] / 255, smile=[0, 1, 0, 1], identity=[1, 1, 2, 2])
    with pytest.raises(InputError, match="float64 and not bytes"):
        load_source("faces", tmp_path)


@pytest.mark.parametrize("number", [1e300, -1e19, 2.0**63])
def test_whole_numbers_beyond_64_bits(number: float) -> None:
    with pytest.raises(InputError, match="whole numbers"):
        whole_numbers([number], "labels")


def npy(shape: tuple[int, ...], values: bytes, kind: str = "<f4") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": shape})
    return stream.getvalue() + values


def archive(file: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as found:
        for name, content in members.items():
            found.writestr(f"{name}.npy", content)
    return file


@pytest.mark.parametrize("shape", [(10**12,), (2**40, 2**40), (1000,), (3,), (-4,), (2**62, 4)])
def test_headers_that_lie(tmp_path: Path, shape: tuple[int, ...]) -> None:
    file = archive(tmp_path / "lie.npz", x=npy(shape, bytes(16)))
    with pytest.raises(InputError, match=r"lie\.npz' cannot be read .*tells of .* bytes, and the file has 16"):
        central_from_npz(file)


def test_an_archive_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = archive(tmp_path / "bomb.npz", x=npy((250_000,), bytes(1_000_000)), y=npy((250_000,), bytes(1_000_000)))
    assert file.stat().st_size < 5000
    monkeypatch.setenv("MIXFED_MAX_BYTES", "1999999")
    with pytest.raises(InputError, match=r"would need 2,000,000 bytes .* 1,999,999 are allowed.* MIXFED_MAX_BYTES"):
        central_from_npz(file)
    assert len(central_from_npz(file, ["x"])) == 250_000  # only what is asked for counts
    monkeypatch.setenv("MIXFED_MAX_BYTES", "2000000")
    assert len(central_from_npz(file)) == 250_000
    monkeypatch.setenv("MIXFED_MAX_BYTES", "much")
    with pytest.raises(InputError, match="MIXFED_MAX_BYTES must be a whole number of bytes, not 'much'"):
        central_from_npz(file)


def test_elements_without_bytes(tmp_path: Path) -> None:
    file = archive(tmp_path / "text.npz", x=npy((10**15,), b"", "<U0"))
    with pytest.raises(InputError, match=r"text\.npz' cannot be read .*elements without bytes"):
        central_from_npz(file)


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs more memory than there is \(Unable to allocate"), reading(tmp_path):
        np.empty(1 << 60, np.uint8)


def test_without_a_limit_of_the_users_own_it_is_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIXFED_MAX_BYTES", raising=False)
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert max_bytes() == pytest.approx(memory / 2, rel=0.01)


def test_a_gzipped_file_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnist").mkdir()
    for name in ("images-idx3", "labels-idx1"):
        (tmp_path / "mnist" / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(bytes(8 << 20)))
    monkeypatch.setenv("MIXFED_MAX_BYTES", str(1 << 20))
    with pytest.raises(InputError, match=r"would need more than .* bytes of memory, and 1,048,576 are allowed"):
        load_source("mnist", tmp_path)


def test_pictures_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are kept in a mapped file, into which nothing is written without room."""

    def no_room(descriptor: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    write_vqa(tmp_path)
    source = load_source("vqa", tmp_path, size=16)
    assert source.prepare is not None
    monkeypatch.setattr("os.posix_fallocate", no_room)
    with pytest.raises(InputError, match=r"^768 bytes are needed on disk in .*: No space left on device\.$"):
        source.prepare({"x": torch.tensor([3])})
    monkeypatch.undo()
    assert source.prepare({"x": torch.tensor([3])})["x"].max() > 0


def changed(file: Path, key: str, value: Any) -> None:
    table = json.loads(file.read_text())
    next(iter(table.values()))[0][key] = value
    file.write_text(json.dumps(table))


VQA: dict[str, Callable[[Path, Path], object]] = {
    "no JSON": lambda asked, told: asked.write_text("{"),
    "no text": lambda asked, told: asked.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda asked, told: asked.write_text("[]"),
    "nesting": lambda asked, told: asked.write_text("[" * 100_000),
    "no questions": lambda asked, told: asked.write_text('{"questions": []}'),
    "numbers": lambda asked, told: asked.write_text('{"questions": [1, 2]}'),
    "other types": lambda asked, told: changed(asked, "image_id", "one"),
    "no words": lambda asked, told: changed(asked, "question", None),
    "a list as an answer": lambda asked, told: changed(told, "multiple_choice_answer", ["red"]),
    "an answer that lacks": lambda asked, told: changed(told, "question_id", -5),
    "an image that lacks": lambda asked, told: changed(asked, "image_id", -5),
}


@pytest.mark.parametrize("how", VQA)
def test_vqa_files_of_other_forms(tmp_path: Path, how: str) -> None:
    write_vqa(tmp_path)
    place = tmp_path / "vqa"
    questions = place / "v2_OpenEnded_mscoco_train2014_questions.json"
    VQA[how](questions, place / "v2_mscoco_train2014_annotations.json")
    with pytest.raises(InputError, match=r"vqa/.*(train2014)"):
        load_source("vqa", tmp_path)
