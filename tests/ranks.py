"""Ranks without torchrun: processes that are forked from a warm one and find each other through a file."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mixfed.backends.distributed.ranks import Ranks
from tests.warm import Process


def on_ranks(function: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Any]:
    """What ``function(ranks, *arguments)`` returns on each rank; all of them must come to their end."""
    with tempfile.TemporaryDirectory(prefix="mixfed-ranks-") as folder:
        processes = [Process(_rank, folder, rank, size, function, arguments) for rank in range(size)]
        outputs = [process.communicate() for process in processes]
        assert [process.returncode for process in processes] == [0] * size, outputs
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def _rank(folder: str, rank: int, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    address = f"file://{folder}/store"
    dist.init_process_group("gloo", address, timedelta(seconds=120), rank=rank, world_size=size)
    found = function(Ranks(), *arguments)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
