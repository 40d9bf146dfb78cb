"""The processes of one run, by torch.distributed: what they tell each other, and how the loss of one is noticed.

Every method is a collective: all ranks call it, in the same order. Values of any kind are pickled, and the tensors in
them travel beside as plain bytes. Tensors on GPUs are summed by NCCL, everything else goes over gloo.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mixfed.backends.distributed.launch import attempt, local_rank, started_by_torchrun
from mixfed.errors import InputError, RunStopped

T = TypeVar("T")

TIMEOUT = 1800.0
"""Seconds that a rank waits for the others. A rank that has died is noticed at once."""

_ENVELOPE = 4096
"""Bytes that each rank sends to the others first: most of what they have to tell fits in."""


class LostRank(RunStopped):
    """Another rank has died, or did not answer in time."""


class Ranks:
    """The ranks of a run as one of them sees them; rank 0 leads: it writes, prints and evaluates the common model.

    ``waited`` are the seconds that this rank spent in collectives, mostly waiting for slower ones.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = store
        self.waited = 0.0
        self._raised: Exception | None = None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: T, error: Exception | None = None) -> list[T]:
        """What every rank gave, in the order of ranks; an ``error`` that a rank gave is raised on each."""
        letter, tensors = _packed(value)
        with self._together():
            sizes, letters = self._letters(letter, tensors, error)
            blocks = []
            for rank, size in enumerate(sizes):
                block = tensors if rank == self.rank else torch.empty(size, dtype=torch.uint8)
                if size:
                    dist.broadcast(block, rank)
                blocks.append(block)
        return [_unpacked(*both) for both in zip(letters, blocks, strict=True)]

    def to_first(self, value: T) -> list[T]:
        """What every rank gave, on rank 0; nothing on the others."""
        letter, tensors = _packed(value)
        with self._together():
            sizes, letters = self._letters(letter, tensors, None)
            if not self.leads:
                if len(tensors):
                    dist.send(tensors, 0)
                return []
            found = [value]
            for rank in range(1, self.size):
                block = torch.empty(sizes[rank], dtype=torch.uint8)
                if sizes[rank]:
                    dist.recv(block, rank)
                found.append(_unpacked(letters[rank], block))
        return found

    def of(self, rank: int, value: T) -> T:
        """What this rank gave; the values of the others are not looked at."""
        return self.gather(value if rank == self.rank else None)[rank]  # type: ignore[return-value]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on a rank."""
        return any(self.gather(flag))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, which is the same on each to the last bit; written into the tensor.

        No rank may fail between the last :meth:`gather` and this, for an error travels in letters only.
        """
        with self._together():
            dist.all_reduce(tensor)
        return tensor

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What is done here is done by all ranks or by none: the sentence with which one refuses is raised on each.

        The others hear of it wherever they are when they next gather something.
        """
        try:
            yield
        except (InputError, RunStopped) as error:
            is_known = self._raised is not None and self._raised in (error, error.__cause__)
            if not is_known and not isinstance(error, LostRank):
                self.gather(None, error)
            raise
        self.gather(None)

    def is_first_to_tell(self) -> bool:
        """Whether no other rank has asked this before; it works when ranks are lost, unless the first machine is."""
        try:
            return self._store is not None and self._store.add("told", 1) == 1
        except RuntimeError:
            return True

    def _letters(self, letter: bytes, tensors: Tensor, error: Exception | None) -> tuple[list[int], list[bytes]]:
        """The size of every rank's tensors, and every rank's letter: one collective where all letters are short."""
        if error is not None:
            letter = pickle.dumps((isinstance(error, InputError), str(error)))
        numbers = (len(letter), len(tensors), int(error is not None))
        head = b"".join(number.to_bytes(8, "little") for number in numbers)
        found = self._blocks((head + letter)[:_ENVELOPE], _ENVELOPE)
        heads = [[int.from_bytes(block[i : i + 8], "little") for i in (0, 8, 16)] for block in found]
        lengths = [length for length, _, _ in heads]
        if len(head) + max(lengths) > _ENVELOPE:
            found = self._blocks(head + letter, len(head) + max(lengths))
        letters = [block[len(head) : len(head) + length] for block, length in zip(found, lengths, strict=True)]
        failed = [rank for rank, (_, _, fails) in enumerate(heads) if fails]
        if failed:
            self._raise(failed[0], letters[failed[0]], error)
        return [size for _, size, _ in heads], letters

    def _raise(self, rank: int, letter: bytes, mine: Exception | None) -> None:
        """Raises the error of this rank."""
        is_input, text = pickle.loads(letter)
        theirs = (InputError if is_input else RunStopped)(text if rank == 0 else f"On rank {rank}: {text}")
        self._raised = mine if rank == self.rank and mine is not None else theirs
        raise self._raised

    def _blocks(self, block: bytes, size: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(block.ljust(size, b"\0")), dtype=torch.uint8)
        found = [torch.empty(size, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, mine)
        return [x.numpy().tobytes() for x in found]

    @contextmanager
    def _together(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        except RunStopped:
            raise
        except RuntimeError as error:
            why = " ".join(str(error).split())
            slow = "time" in why.lower() and "out" in why.lower()
            told = "did not answer in time" if slow else "was lost"
            raise LostRank(f"Another rank {told}, so rank {self.rank} of {self.size} stopped too.") from error
        finally:
            self.waited += time.perf_counter() - began


@contextmanager
def join_ranks(timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, which wait so many seconds for each other.

    When the ranks part, gloo's threads must end with them: a thread that outlives the interpreter aborts the process.
    The functions of ``torch.distributed.nn`` have the group of the moment of their import for a default, and whoever
    takes the first gradient imports them. So this module does, before there is a group that they could keep alive.
    """
    if not started_by_torchrun():
        raise InputError("Ranks are started by torchrun, and this process was not; see docs/scale.md.")
    if not timeout > 0:
        raise InputError(f"Ranks wait for each other for some seconds, not {timeout:g}.")
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
        backend = "cpu:gloo,cuda:nccl"
    patience = timedelta(seconds=timeout)
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=patience)))
        store = PrefixStore(attempt(), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    except (RuntimeError, ValueError) as error:
        line = str(error).strip().partition("\n")[0].rstrip(".")
        raise RunStopped(f"The ranks did not find each other: {line}.") from error
    try:
        yield Ranks(PrefixStore("mixfed", store))
    finally:
        dist.destroy_process_group()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value.detach().cpu().contiguous())
        return value.dtype, tuple(value.shape), str(value.device)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, block: Tensor) -> None:
        super().__init__(file)
        self.block, self.start = block, 0

    def persistent_load(self, known: Any) -> Tensor:
        dtype, shape, device = known
        size = dtype.itemsize * int(torch.Size(shape).numel())
        found = self.block[self.start : self.start + size].clone().view(dtype).view(shape)
        self.start += size
        return found.to(torch.device(device).type)


def _packed(value: Any) -> tuple[bytes, Tensor]:
    """A value as a letter, and the bytes of all tensors in it."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    parts = [x.reshape(-1).view(torch.uint8) for x in packer.tensors]
    return file.getvalue(), torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _unpacked(letter: bytes, block: Tensor) -> Any:
    return _Unpacker(io.BytesIO(letter), block).load()
