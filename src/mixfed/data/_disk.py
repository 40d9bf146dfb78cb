"""Stores on disk: one .npy file per field, opened memory-mapped so that opening reads no examples.

A file that is mapped to be written into has its room on the disk reserved before: on a full disk it would end the
process without a word.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays
from mixfed.data._files import DAMAGE
from mixfed.errors import InputError

_ZEROS = bytes(1 << 20)


def write(folder: str | Path, arrays: Arrays, **extra: NDArray[Any] | None) -> None:
    """Write all or nothing: into a folder beside, renamed at the end, never over files that may be mapped."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"'{target}' exists and is not an empty folder; choose another one or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        (beside / "fields").mkdir()
        for name, array in arrays.items():
            np.save(beside / "fields" / f"{name}.npy", array, allow_pickle=False)
        for name, values in extra.items():
            if values is not None:
                np.save(beside / f"{name}.npy", values, allow_pickle=False)
        beside.chmod(0o755)
        if target.exists():
            target.rmdir()
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def read_fields(folder: str | Path) -> Arrays:
    """Every field of a stored folder, memory-mapped and read-only."""
    files = sorted((Path(folder) / "fields").glob("*.npy"))
    if not files:
        raise InputError(f"'{folder}' holds no stored data (no fields/*.npy); write it there with .save()")
    return {file.stem: read(file) for file in files}


def read(file: Path) -> NDArray[Any]:
    """One array, memory-mapped."""
    try:
        array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except DAMAGE as error:
        raise InputError(f"'{file}' is no whole .npy file ({error}); write the data again with .save()") from error
    return array


def reserve(file: BinaryIO, start: int, end: int, where: Path) -> None:
    """Gives the file room on the disk from byte ``start`` on, where nothing is yet, or says that there is none."""
    if end <= start:
        return
    before = os.fstat(file.fileno()).st_size
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), start, end - start)
        else:
            file.seek(start)
            for at in range(start, end, len(_ZEROS)):
                file.write(_ZEROS[: end - at])
            file.flush()
    except (OSError, OverflowError) as error:
        file.truncate(before)
        told = getattr(error, "strerror", error)
        raise InputError(
            f"{end - start:,} bytes are needed on disk in {where}, and there is no room: {told}."
        ) from error
