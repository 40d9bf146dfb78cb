"""Reading files that others wrote: whatever is wrong with one becomes a sentence that names it.

A small file can ask for much memory: an archive that unpacks to a thousand times its size, a header that tells of more
elements than there are. What a file needs is found out before it is read, and has a limit.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.errors import InputError

DAMAGE = (
    *(OSError, EOFError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, csv.Error, pickle.UnpicklingError, struct.error, SyntaxError),
)
LIMIT = "MIXFED_MAX_BYTES"
"""The environment variable that says how many bytes a file may unpack to."""


@contextmanager
def reading(file: str | Path) -> Iterator[None]:
    """Turn the many ways in which a missing, cut or foreign file fails into an InputError."""
    if not Path(file).exists():
        raise InputError(f"'{file}' does not exist; check the path")
    try:
        yield
    except InputError:
        raise
    except MemoryError as error:
        raise InputError(f"'{file}' needs more memory than there is ({error or 'out of memory'})") from error
    except DAMAGE as error:
        told = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 160, placeholder=" …")
        raise InputError(f"'{file}' cannot be read ({told}); it is damaged or of another format") from error


def max_bytes() -> int:
    """How many bytes a file may unpack to: what MIXFED_MAX_BYTES says, or half of this machine's memory."""
    told = os.environ.get(LIMIT)
    if not told:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if not (told.isascii() and told.isdigit()):
        raise InputError(f"the environment variable {LIMIT} must be a whole number of bytes, not '{told}'")
    return int(told)


def require_room(file: str | Path, needed: int, at_least: str = "") -> None:
    """Refuse a file that unpacks to more than :func:`max_bytes`."""
    if needed > max_bytes():
        raise InputError(
            f"'{file}' would need {at_least}{needed:,} bytes of memory, and {max_bytes():,} are allowed; "
            f"if it is to be trusted, set the environment variable {LIMIT} to more"
        )


def content(file: Path) -> bytes:
    """The bytes of a file, unpacked where its name ends in .gz."""
    with reading(file):
        require_room(file, file.stat().st_size)
        if file.suffix != ".gz":
            return file.read_bytes()
        unpacked = io.BytesIO()
        with gzip.open(file) as stream:
            while piece := stream.read(1 << 20):
                unpacked.write(piece)
                require_room(file, unpacked.tell(), "more than ")
        return unpacked.getvalue()


def load_npz(file: str | Path, fields: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """The given (or all) arrays of a .npz file, refusing pickled objects."""
    with reading(file), open(file, "rb") as stream:
        if stream.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
            raise InputError(f"'{file}' holds a single array; save named arrays with numpy.savez")
        with zipfile.ZipFile(stream) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            require_fields(file, fields or (), list(members))
            chosen = {name: members[name] for name in (members if fields is None else fields)}
            require_room(file, sum(_size(archive, info) for info in chosen.values()))
            return {name: _member(archive, info) for name, info in chosen.items()}


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(info) as stream:
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        return array


def _size(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """How many bytes an array of a .npz file has; its own header and the archive's must agree about that."""
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(stream)
        stored = info.file_size - stream.tell()
    if not dtype.itemsize:
        raise ValueError(f"'{info.filename}' has elements without bytes")
    told = math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        name = f"'{info.filename.removesuffix('.npy')}' in '{archive.filename}'"
        raise InputError(f"{name} holds Python objects; save numbers, or text as .astype(str)")
    if told != stored:
        raise ValueError(f"the header of '{info.filename}' tells of {told:,} bytes, and the file has {stored:,}")
    return stored


def require_fields(file: str | Path, wanted: Sequence[str], present: Sequence[str]) -> None:
    """Refuse a field that the file lacks, and say what it has."""
    missing = [name for name in wanted if name not in present]
    if missing:
        numbers = any(name.replace(".", "", 1).isdigit() for name in present)
        hint = " (is its first line an example, and not the names?)" if numbers else ""
        raise InputError(f"'{file}' has no field '{missing[0]}'; it has {', '.join(present)}{hint}")
