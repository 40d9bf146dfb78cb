"""Would Feddle's anchors pay in factors? ``taskset -c 1 python benchmarks/projections.py``.

A search projects a gradient G on every anchor: ⟨G, a⟩ is one row of a product where anchors are vectors, and a sum over
the rank, Σ dⱼᵀGxⱼ, where an anchor is a client's inputs and output gradients. Milliseconds of processor time on one
core, the best of several.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from mixfed.models.products import linear

LAYERS = ((784, 64), (784, 200), (1024, 1024))
RANKS = (5, 20, 100)
ANCHORS = 20


def milliseconds(work: Callable[[], object], repeats: int = 15) -> float:
    """What the work takes, at best."""
    work()
    took = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(3):
            work()
        took.append((time.process_time() - began) / 3)
    return 1000 * min(took)


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title=f"A projection on {ANCHORS} anchors, ms", title_justify="left")
    for heading in ("layer", "vectors", *(f"rank {rank}" for rank in RANKS)):
        table.add_column(heading, justify="right")
    for inputs, outputs in LAYERS:
        gradient, vectors = torch.randn(outputs, inputs), torch.randn(ANCHORS, outputs * inputs)
        found = [milliseconds(lambda g=gradient, v=vectors: v @ g.flatten())]  # type: ignore[misc]
        for rank in RANKS:
            x, d = torch.randn(ANCHORS * rank, inputs), torch.randn(ANCHORS * rank, outputs)
            found.append(
                milliseconds(lambda g=gradient, x=x, d=d: (linear(x, g) * d).view(ANCHORS, -1).sum(1))  # type: ignore[misc]
            )
        table.add_row(f"{inputs}×{outputs}", *(f"{ms:.2f}" for ms in found))
    Console().print(table)


if __name__ == "__main__":
    with torch.no_grad():
        main()
