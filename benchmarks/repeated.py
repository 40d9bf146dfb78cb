"""The examples of a few thousand clients, seen as those of a million: one file, mapped into memory again and again.

So a population of any size has real examples and costs neither disk nor time to write, and no system waits for pages
that were never read before. The pages are counted in a process's memory each time that they are mapped and touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

POOL = 4096
"""Clients in a file. A power of two, so that their examples fill whole pages whatever their size."""
MAP_FIXED = 0x10


def repeated(file: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array of ``shape`` whose first axis goes round and round through the ``POOL`` entries of the file."""
    pool, entries = file.stat().st_size, shape[0]
    times = -(-entries // POOL)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t]

    def map_pages(at: int | None, length: int, protection: int, flags: int, descriptor: int) -> int:
        address = libc.mmap(at, length, protection, flags, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return address

    start = map_pages(None, times * pool, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    with file.open("r+b") as opened:
        for turn in range(times):
            flags = mmap.MAP_SHARED | MAP_FIXED
            map_pages(start + turn * pool, pool, mmap.PROT_READ | mmap.PROT_WRITE, flags, opened.fileno())
    seen = (ctypes.c_char * (times * pool)).from_address(start)
    return np.frombuffer(seen, dtype)[: int(np.prod(shape))].reshape(shape)
