"""Randomness as a pure function: every draw depends only on (seed, purpose, counters).

Nothing here keeps state, so a run that is resumed, reordered or cut into other chunks draws the same numbers.
Few draws (a cohort, a partition) come from a NumPy generator made for the occasion; many small ones (the shuffle
of every client, dropout masks) come from a hash of a key and a counter, in NumPy or torch, with equal values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def key(seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit number that stands for (seed, purpose, counters)."""
    text = "/".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A NumPy generator for one occasion."""
    return np.random.Generator(np.random.PCG64(key(seed, purpose, *counters)))


def bits(keys: NDArray[np.int64] | int, counters: NDArray[np.int64] | int) -> NDArray[np.uint64]:
    """64 random bits for each (key, counter), broadcast: the finaliser of SplitMix64, applied twice."""
    with np.errstate(over="ignore"):
        x = np.asarray(keys).astype(np.uint64) + (np.asarray(counters).astype(np.uint64) + np.uint64(1)) * np.uint64(
            _GOLDEN
        )
        return _finalise(_finalise(x))


def _finalise(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def tensor_bits(keys: Tensor, counters: Tensor) -> Tensor:
    """:func:`bits` on int64 tensors (two's complement), usable inside ``torch.vmap``."""
    x = keys + (counters + 1) * signed(_GOLDEN)
    for _ in range(2):
        x = (x ^ _shift(x, 30)) * signed(_FIRST)
        x = (x ^ _shift(x, 27)) * signed(_SECOND)
        x = x ^ _shift(x, 31)
    return x


def tensor_counters(shape: Sequence[int], first: int, device: torch.device) -> Tensor:
    """A counter for every element: ``first`` and a number that its coordinates decide, in a tensor of any size."""
    import torch

    total = torch.full((1,) * len(shape), first, device=device)
    for axis, size in enumerate(shape):
        along = torch.arange(size, device=device) * signed(_FIRST**axis)
        total = total + along.view(-1, *(1,) * (len(shape) - axis - 1))
    return total


def tensor_uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Uniform float32 numbers in [0, 1) from the top 24 bits of :func:`tensor_bits`."""
    return _shift(tensor_bits(keys, counters), 40).float() * (1.0 / (1 << 24))


def signed(value: int) -> int:
    """The number whose two's complement has the lowest 64 bits of this one."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: Tensor, places: int) -> Tensor:
    return (x >> places) & ((1 << (64 - places)) - 1)
