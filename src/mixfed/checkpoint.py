"""Checkpoints: a tree on disk, written so that a half-written one is never taken for a whole one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from mixfed import tree
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
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors, rest = _apart(contents)
        write_atomically(self._path(contents["round"]), to_bytes(tensors, {"rest": json.dumps(rest)}))
        for old in self._files()[:-2]:
            old.unlink(missing_ok=True)

    def load(self) -> dict[str, Any] | None:
        """The newest whole checkpoint, or None where there is none."""
        for file in reversed(self._files()):
            try:
                return _read(file)
            except (SafetensorError, OSError, json.JSONDecodeError, KeyError):
                continue  # damaged from outside: the one before is whole
        return None

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:08d}{_SUFFIX}"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"round-*{_SUFFIX}")) if self.folder.is_dir() else []


def write_atomically(path: Path, contents: bytes) -> None:
    """The whole file or nothing, even if the machine stops in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"Cannot write {path}: {error.strerror}.") from error


def save_params(path: Path, params: tree.Params) -> None:
    """A model's parameters as one safetensors file."""
    write_atomically(path, to_bytes({name: x.contiguous() for name, x in params.items()}))


def _apart(contents: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    flat = tree.flatten(contents)
    tensors = {path: x.detach().contiguous() for path, x in flat.items() if isinstance(x, Tensor)}
    return tensors, {path: x for path, x in flat.items() if not isinstance(x, Tensor)}


def _read(file: Path) -> dict[str, Any]:
    with safe_open(str(file), framework="pt") as stored:
        flat: dict[str, Any] = json.loads(stored.metadata()["rest"])
        for path in stored.keys():  # noqa: SIM118 (not a mapping)
            flat[path] = stored.get_tensor(path)
    return tree.unflatten(flat)
