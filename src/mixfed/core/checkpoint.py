"""Checkpoints: a tree on disk, of which a damaged one, or one of another run, is never taken for a whole one."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from mixfed.core import tree
from mixfed.core.files import write_atomically
from mixfed.core.log import Damaged, Log
from mixfed.core.log import read as read_log
from mixfed.errors import InputError

warn = logging.getLogger("mixfed").warning
"""Where sentences go that nobody has asked for."""

_SUFFIX = ".safetensors"
_FORM = 3
_GROWING = ("history", "diagnostics", "costs", "jobs")
_SEAL = re.compile(rb'"seal":"([0-9a-f]{32})"')
_OPEN = "0" * 32
_AT_ONCE = 1 << 20


class Checkpoints:
    """A folder with the newest checkpoint and the one before it.

    A checkpoint is one safetensors file: tensors under their path in the tree, everything else as JSON in its header,
    which also has a checksum of the whole file, the version of mixfed and the ``identity`` of the run. What grows with
    the rounds (history, diagnostics, costs, first jobs) is in a file beside it. ``say`` is told where a damaged one is
    passed over.
    """

    def __init__(
        self,
        folder: str | Path,
        every: int = 10,
        *,
        identity: str = "",
        say: Callable[[str], None] = warn,
    ) -> None:
        if every < 1:
            raise InputError("Checkpoints are written every 1 or more rounds.")
        self.folder = Path(folder)
        self.every = every
        self._marks = {"run": identity, "writer": f"mixfed {version('mixfed')}, form {_FORM}"}
        self._say = say
        self._told: set[str] = set()
        self._log: Log | None = None
        self._last: Path | None = None
        """The checkpoint that was written or read last."""
        self._log_of: dict[str, str] = {}
        """The name of the log that a checkpoint refers to."""

    def due(self, round: int) -> bool:
        """Whether a checkpoint is to be written after this round."""
        return round % self.every == 0

    def save(self, contents: Mapping[str, Any]) -> None:
        """Writes a checkpoint named after ``contents["round"]`` and removes all but the one before."""
        number = f"{contents['round']:08d}"
        lists = {name: contents[name] for name in _GROWING if name in contents}
        log, self._log = self._log, None  # what an error leaves half done is not gone on with
        if log is None or not log.goes_on_with(lists):
            log = Log(self.folder / f"log-{number}.jsonl")
        mark = log.add(lists) if lists else {}
        tensors, header = _apart({**contents, **dict.fromkeys(lists)})
        header |= self._marks | {"log": json.dumps(mark), "seal": _OPEN}
        path = self.folder / f"round-{number}{_SUFFIX}"
        write_atomically(path, *_sealed(to_bytes(tensors, header)))
        self._log, self._log_of[path.name] = log, log.path.name
        self._keep(path, self._last)
        self._last = path

    def load(self) -> dict[str, Any] | None:
        """The newest whole checkpoint, or None where there is none at all."""
        files = self.files()
        for file in reversed(files):
            try:
                contents = self.read(file)
            except Damaged:
                continue
            if file != files[-1]:
                self._tell(f"{files[-1]} is damaged, so the run goes on from the checkpoint before, {file.name}.")
            self._last, self._log = file, None
            return contents
        if files:
            raise InputError(f"No checkpoint in {self.folder} can be read; remove them to start the run anew.")
        return None

    def resume(self, *, seed: int, rounds: int, every: int) -> dict[str, Any] | None:
        """The newest whole checkpoint of a run with this seed, as a run of so many rounds has it.

        Its history (and what that had cost) has what is evaluated ``every`` so many rounds; the end of a shorter run
        is not in it.
        """
        saved = self.load()
        if saved is None:
            return None
        if saved["seed"] != seed:
            raise InputError(f"The run in {self.folder} has the seed {saved['seed']}, so it cannot go on with {seed}.")
        if saved["round"] > rounds:
            raise InputError(
                f"The run in {self.folder} has done {saved['round']} rounds, so it cannot end at {rounds}."
            )
        for name in ("history", "costs"):
            saved[name] = [e for e in saved[name] if e["round"] % every == 0 or e["round"] == rounds]
        return saved

    def files(self) -> list[Path]:
        """All checkpoints, the newest last."""
        return sorted(self.folder.glob(f"round-*{_SUFFIX}")) if self.folder.is_dir() else []

    def read(self, file: Path) -> dict[str, Any]:
        """One checkpoint, if it is whole and of this run."""
        try:
            _check_seal(file)
            with safe_open(str(file), framework="pt") as stored:
                header = stored.metadata()
                self._check_marks(file, header)
                rest = json.loads(header["rest"])
                tensors = set(stored.keys())
                flat = {
                    path: stored.get_tensor(path) if path in tensors else rest[path]
                    for path in json.loads(header["order"])
                }
            mark = json.loads(header["log"])
            self._log_of[file.name] = mark.get("file", "")
            contents = tree.unflatten(flat)
            contents.update(read_log(self.folder, mark) if mark else {})
            return contents
        except (SafetensorError, OSError, KeyError) as error:
            raise Damaged from error

    def _check_marks(self, file: Path, header: Mapping[str, str]) -> None:
        if header["writer"] != self._marks["writer"]:
            told = f"{file} was written by {header['writer']}, and this is {self._marks['writer']}"
            raise InputError(f"{told}; resume with that version, or start a new run.")
        if header["run"] != self._marks["run"]:
            raise InputError(f"{file} is a checkpoint of another run; put this run's own back, or start a new run.")

    def _keep(self, *kept: Path | None) -> None:
        """Removes all other checkpoints, and the logs that only they refer to."""
        names = {file.name for file in kept if file}
        self._log_of = {name: log for name, log in self._log_of.items() if name in names}
        for old in (*self.files(), *self.folder.glob("log-*.jsonl")):
            if old.name not in names and old.name not in self._log_of.values():
                old.unlink(missing_ok=True)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._say(sentence)


def save_params(path: Path, params: tree.Params) -> None:
    """A model's parameters as one safetensors file."""
    write_atomically(path, to_bytes({name: x.contiguous() for name, x in params.items()}))


def _apart(contents: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a tree, and a header with everything else and the order of its names."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    stored: set[int] = set()
    flat = tree.flatten(contents)
    for path, x in flat.items():
        if not isinstance(x, Tensor):
            rest[path] = x
            continue
        memory = x.untyped_storage().data_ptr()
        tensors[path] = x.detach().clone() if memory in stored else x.detach()  # safetensors takes no shared memory
        tensors[path] = tensors[path].contiguous()
        stored.add(memory)
    return tensors, {"rest": json.dumps(rest), "order": json.dumps(list(flat))}


def _sealed(contents: bytes) -> tuple[memoryview, bytes, memoryview]:
    """A safetensors file, in three pieces, with its checksum in the place that its header has for it."""
    place = _SEAL.search(contents, 8, 8 + int.from_bytes(contents[:8], "little"))
    assert place is not None
    view = memoryview(contents)
    return view[: place.start(1)], _hash(contents).hexdigest().encode(), view[place.end(1) :]


def _check_seal(file: Path) -> None:
    """The checksum is that of all bytes of the file, those of the checksum itself taken as zeros."""
    with open(file, "rb") as stored:
        length = stored.read(8)
        head = length + stored.read(min(int.from_bytes(length, "little"), file.stat().st_size))
        place = _SEAL.search(head)
        if place is None:
            raise Damaged
        found = _hash(head[: place.start(1)], _OPEN.encode(), head[place.end(1) :])
        while some := stored.read(_AT_ONCE):
            found.update(some)
    if found.hexdigest().encode() != place[1]:
        raise Damaged


def _hash(*contents: bytes) -> Any:
    found = hashlib.blake2b(digest_size=16)
    for some in contents:
        found.update(some)
    return found
