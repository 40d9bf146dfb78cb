"""Checkpoints: a tree on disk, written so that a half-written one is never taken for a whole one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from mixfed.core import tree
from mixfed.errors import InputError

_SUFFIX = ".safetensors"


class Checkpoints:
    """A folder with the newest checkpoint and the one before it.

    A checkpoint is one safetensors file: tensors under their path in the tree, everything else as JSON in its header.
    It is written under another name, flushed to the disk, and renamed.
    """

    def __init__(self, folder: str | Path, every: int = 10) -> None:
        if every < 1:
            raise InputError("Checkpoints are written every 1 or more rounds.")
        self.folder = Path(folder)
        self.every = every

    def due(self, round: int) -> bool:
        """Whether a checkpoint is to be written after this round."""
        return round % self.every == 0

    def save(self, contents: Mapping[str, Any]) -> None:
        """Writes a checkpoint named after ``contents["round"]`` and removes all but the one before."""
        tensors, rest = _apart(contents)
        write_atomically(self._path(contents["round"]), to_bytes(tensors, {"rest": json.dumps(rest)}))
        for old in self._files()[:-2]:
            old.unlink(missing_ok=True)

    def load(self) -> dict[str, Any] | None:
        """The newest whole checkpoint, or None where there is none at all."""
        files = self._files()
        for file in reversed(files):
            try:
                return _read(file)
            except (SafetensorError, OSError, ValueError, KeyError):
                continue  # damaged from outside: the one before is whole
        if files:
            raise InputError(f"No checkpoint in {self.folder} can be read; remove them to start the run anew.")
        return None

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:08d}{_SUFFIX}"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"round-*{_SUFFIX}")) if self.folder.is_dir() else []


def write_atomically(path: Path, contents: bytes) -> None:
    """The whole file or nothing, even if the machine stops in between."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise InputError(f"Cannot write {path}: {error.strerror}.") from error


def save_params(path: Path, params: tree.Params) -> None:
    """A model's parameters as one safetensors file."""
    write_atomically(path, to_bytes({name: x.contiguous() for name, x in params.items()}))


def _apart(contents: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    stored: set[int] = set()
    for path, x in tree.flatten(contents).items():
        if not isinstance(x, Tensor):
            rest[path] = x
            continue
        memory = x.untyped_storage().data_ptr()
        tensors[path] = x.detach().clone() if memory in stored else x.detach()  # safetensors takes no shared memory
        tensors[path] = tensors[path].contiguous()
        stored.add(memory)
    return tensors, rest


def _read(file: Path) -> dict[str, Any]:
    with safe_open(str(file), framework="pt") as stored:
        flat: dict[str, Any] = json.loads((stored.metadata() or {})["rest"])
        for path in stored.keys():  # noqa: SIM118 (not a mapping)
            flat[path] = stored.get_tensor(path)
    return tree.unflatten(flat)
