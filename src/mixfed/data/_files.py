"""Reading files that others wrote: whatever is wrong with one becomes a sentence that names it."""

from __future__ import annotations

import csv
import lzma
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.errors import InputError

DAMAGE = (
    *(OSError, EOFError, ValueError, TypeError, LookupError, NotImplementedError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, csv.Error, pickle.UnpicklingError, struct.error),
)


@contextmanager
def reading(file: str | Path) -> Iterator[None]:
    """Turn the many ways in which a missing, cut or foreign file fails into an InputError."""
    if not Path(file).exists():
        raise InputError(f"'{file}' does not exist; check the path")
    try:
        yield
    except InputError:
        raise
    except DAMAGE as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"'{file}' cannot be read ({told}); it is damaged or of another format") from error


def load_npz(file: str | Path, fields: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """The given (or all) arrays of a .npz file, refusing pickled objects."""
    with reading(file):
        opened = np.load(file, allow_pickle=False)
        if not isinstance(opened, np.lib.npyio.NpzFile):
            raise InputError(f"'{file}' holds a single array; save named arrays with numpy.savez")
        with opened as arrays:
            require_fields(file, fields or (), arrays.files)
            return {name: arrays[name] for name in (arrays.files if fields is None else fields)}


def require_fields(file: str | Path, wanted: Sequence[str], present: Sequence[str]) -> None:
    """Refuse a field that the file lacks, and say what it has."""
    missing = [name for name in wanted if name not in present]
    if missing:
        raise InputError(f"'{file}' has no field '{missing[0]}'; it has {', '.join(present)}")
