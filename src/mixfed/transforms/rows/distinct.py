"""Which whole numbers occur, and where: what row exchange does most, so that it has a way of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.unique(keys, return_inverse=True)`` of whole numbers from 0 on, on a processor in a third of the time.

    Every key carries its place in its low bits, so that a sort has one array to move, which numpy does with vectors.
    """
    bits = len(keys).bit_length()
    if not keys.is_cpu or not len(keys) or int(keys.max()) >> (63 - bits):
        found: tuple[Tensor, Tensor] = torch.unique(keys, return_inverse=True)
        return found
    packed = keys.to(torch.int64).numpy() << bits
    packed |= np.arange(len(packed))
    packed.sort()
    begins = np.ones(len(packed), dtype=bool)
    np.greater_equal(packed[1:] ^ packed[:-1], 1 << bits, out=begins[1:])
    first = np.flatnonzero(begins)
    values = packed[first] >> bits
    packed &= (1 << bits) - 1
    number = np.empty_like(packed)
    number[packed] = np.repeat(np.arange(len(first)), np.diff(first, append=len(packed)))
    return torch.from_numpy(values), torch.from_numpy(number)
