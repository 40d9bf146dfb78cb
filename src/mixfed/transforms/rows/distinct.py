"""Which whole numbers occur, and where: what row exchange does most, so that it has a way of its own."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Keys = NDArray[np.int64]


DENSE = 4
"""So many numbers for each key there may be, for a mark at each of them to be faster than a sort."""


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.unique(keys, return_inverse=True)`` of whole numbers from 0 on, on a processor in much less time."""
    top = int(keys.max()) if len(keys) else 0
    bits = len(keys).bit_length()
    if not keys.is_cpu or not len(keys) or top >> (63 - bits):
        found: tuple[Tensor, Tensor] = torch.unique(keys, return_inverse=True)
        return found
    plain = keys.to(torch.int64).numpy()
    values, number = _marked(plain, top + 1) if top < DENSE * len(keys) else _sorted(plain, bits)
    return torch.from_numpy(values), torch.from_numpy(number)


def _marked(keys: Keys, size: int) -> tuple[Keys, Keys]:
    """A mark at every number that occurs; their places are those of the marks."""
    seen = np.zeros(size, dtype=bool)
    seen[keys] = True
    values = np.flatnonzero(seen)
    number = np.empty(size, dtype=np.int64)
    number[values] = np.arange(len(values))
    return values, number[keys]


def _sorted(keys: Keys, bits: int) -> tuple[Keys, Keys]:
    """Every key carries its place in its low bits, so that a sort has one array to move, which numpy does with
    vectors."""
    packed = keys << bits
    packed |= np.arange(len(packed))
    packed.sort()
    begins = np.ones(len(packed), dtype=bool)
    np.greater_equal(packed[1:] ^ packed[:-1], 1 << bits, out=begins[1:])
    first = np.flatnonzero(begins)
    values = packed[first] >> bits
    packed &= (1 << bits) - 1
    number = np.empty_like(packed)
    number[packed] = np.repeat(np.arange(len(first)), np.diff(first, append=len(packed)))
    return values, number


def grouped(number: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The places where each of the numbers 0..count−1 stands, number after number, and where each one's begin."""
    bits = len(number).bit_length()
    if number.is_cpu and bits + count.bit_length() <= 32:  # each with its place in its low bits, as above
        packed = number.numpy().astype(np.uint32) << np.uint32(bits)
        packed |= np.arange(len(packed), dtype=np.uint32)
        packed.sort()
        packed &= np.uint32((1 << bits) - 1)
        order = torch.from_numpy(packed.astype(np.int64))
    else:
        order = torch.argsort(number, stable=True)
    amounts = torch.bincount(number, minlength=count)
    return order, amounts.cumsum(0) - amounts
