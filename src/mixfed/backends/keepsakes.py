"""What a device keeps on its own disk between rounds: its private parts, one small file for every round.

A server that was killed goes on from its last checkpoint and may ask again for a round that the device has done. So a
request of round r starts from what the device kept before r, and later files are forgotten. Requests also say from
which round on a server may come back; files that are older than what it needs then are removed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mixfed.backends import wire
from mixfed.core.algorithm import Private
from mixfed.core.files import write_atomically


class Keepsakes:
    """The private parts of one client, in a folder of its own."""

    def __init__(self, initial: Callable[[], Private], folder: Path, device: torch.device) -> None:
        self._initial, self._folder, self._device = initial, folder, device
        self._round = 0

    def begin(self, round: int, settled: int) -> None:
        """A request of this round begins; no request of a round before ``settled`` will ever come."""
        self._round = round
        rounds = self._rounds()
        needed = max((r for r in rounds if r < settled), default=-1)
        for r in rounds:
            if r >= round or r < needed:
                self._file(r).unlink(missing_ok=True)

    def get(self, source: str, client: int, first: Private | None = None) -> Private:
        """The private part; a part that was never kept is ``first``'s, else the initial one."""
        return self._initial() | (first or {}) | self._stored()

    def put(self, source: str, client: int, private: Private) -> None:
        """Keeps the private part as that of this round."""
        if private:
            write_atomically(self._file(self._round), wire.pack({}, private))

    def lacking(self, source: str, part: str, clients: NDArray[np.int64]) -> int:
        """How many of the clients, which are this one, have not kept this part yet."""
        return int(part not in self._stored()) * len(clients)

    def seen(self, source: str) -> list[int]:
        """The rounds in which something was kept that is still here."""
        return self._rounds()

    def _stored(self) -> Private:
        rounds = self._rounds()
        return wire.unpack(self._file(rounds[-1]).read_bytes(), self._device)[1] if rounds else {}

    def _rounds(self) -> list[int]:
        return sorted(int(file.stem) for file in self._folder.glob("*.safetensors") if file.stem.isdigit())

    def _file(self, round: int) -> Path:
        return self._folder / f"{round:08d}.safetensors"
