"""Reads thousands of damaged CIFAR pickles; run as a process of its own, so that a crash of the interpreter is seen.

Prints how many were read, and how many were refused in a sentence. Any other error ends it with a traceback.
"""

from __future__ import annotations

import pickle
import random
import resource
import sys
from pathlib import Path

import numpy as np

from mixfed.data.sources.cifar import read_pickle
from mixfed.errors import InputError

MEMORY = 4 << 30


def mutated(draw: random.Random, content: bytes) -> bytes:
    """A few bytes changed, cut out, inserted or repeated."""
    found = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 4, 8])):
        place, length = draw.randrange(len(found) + 1), draw.randrange(1, 12)
        how = draw.randrange(5)
        if how == 0 and place < len(found):
            found[place] = draw.randrange(256)
        elif how == 1:
            del found[place : place + length]
        elif how == 2:
            found[place:place] = draw.randbytes(length)
        elif how == 3:
            found[place:place] = found[place : place + 8 * length]
        else:
            found = found[: max(place, 1)]
    return bytes(found)


def main(file: Path, count: int, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    batch = {"data": np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072), "labels": [3, 300], "filenames": ["a", "b"]}
    whole = [pickle.dumps(batch, protocol) for protocol in (2, 3, 4)]
    heads = [content.replace(batch["data"].tobytes(), b"") for content in whole]  # so that most changes hit structure
    draw, read, refused = random.Random(seed), 0, 0
    for number in range(count):
        file.write_bytes(mutated(draw, (whole if number % 4 == 0 else heads)[number % 3]))
        try:
            read_pickle(file, y="labels")
            read += 1
        except InputError:
            refused += 1
    print(read, refused)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
