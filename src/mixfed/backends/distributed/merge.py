"""What the clients of all ranks did, from what those of each did.

What is small, rows of tables and uploads that are wanted one by one are gathered. Sums of whole models, which are the
most of it, are added up on the way (all-reduce).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from mixfed.backends.aggregate import Trees, WeightedSum
from mixfed.backends.distributed.ranks import Ranks
from mixfed.backends.simulator.gathered import Gathered
from mixfed.backends.simulator.team import Found

Leaf = tuple[int, str, str]
"""Where a tensor of a sum belongs: the round, the tree and the leaf."""


@dataclass(frozen=True)
class _Letter:
    """What a rank tells of the clients of one round: everything but its sum, of which it tells the shapes."""

    gathered: Gathered
    shapes: dict[tuple[str, str], tuple[torch.Size, torch.dtype]]

    @classmethod
    def of(cls, one: Gathered) -> _Letter:
        rows = one.sum.rows.compacted() if one.sum.rows is not None else None
        shapes = {(k, n): (x.shape, x.dtype) for k, leaves in (one.sum.total or {}).items() for n, x in leaves.items()}
        return cls(replace(one, sum=replace(one.sum, total=None, rows=rows)), shapes)


def merged(ranks: Ranks, mine: Found, device: torch.device) -> Found:
    """What the clients of all ranks did, by round."""
    letters = ranks.gather({round: _Letter.of(one) for round, one in mine.items()})
    rounds = sorted({round for of_rank in letters for round in of_rank})
    found: Found = {}
    shapes: dict[Leaf, tuple[torch.Size, torch.dtype]] = {}
    for round in rounds:
        told_of = [of_rank[round] for of_rank in letters if round in of_rank]
        found[round] = Gathered(told_of[0].gathered.each)
        for letter in told_of:
            found[round].merge(letter.gathered)
            shapes |= {(round, *leaf): shape for leaf, shape in letter.shapes.items()}
        factors = [letter.gathered.sum.factor for letter in told_of if letter.shapes]
        found[round].sum.factor = factors[0] if len(factors) == 1 else 1.0
        found[round].sum.clients.sort()
        if round in mine and len(factors) > 1:
            _multiply(mine[round].sum)
    for (round, part, leaf), x in _summed(ranks, mine, shapes, device).items():
        whole = found[round].sum
        whole.total = whole.total or {}
        whole.total.setdefault(part, {})[leaf] = x
    return found


def _multiply(own: WeightedSum) -> None:
    """Makes the total itself Σ wᵢ·vᵢ, so that it can be added to others."""
    if own.factor != 1.0:
        for leaves in (own.total or {}).values():
            for x in leaves.values():
                x.mul_(own.factor)
    own.factor = 1.0


def _summed(
    ranks: Ranks, mine: Found, shapes: dict[Leaf, tuple[torch.Size, torch.dtype]], device: torch.device
) -> dict[Leaf, Tensor]:
    """The sums of all leaves over ranks, by one collective for each precision; a rank without clients adds zeros."""
    found: dict[Leaf, Tensor] = {}
    by_dtype = sorted(shapes, key=lambda leaf: (str(shapes[leaf][1]), leaf))
    for _, same in groupby(by_dtype, key=lambda leaf: str(shapes[leaf][1])):
        leaves = list(same)
        parts = [_own(mine, leaf, *shapes[leaf], device).reshape(-1) for leaf in leaves]
        flat = ranks.sum(torch.cat(parts))
        for leaf, x in zip(leaves, torch.split(flat, [len(part) for part in parts]), strict=True):
            found[leaf] = x.view(shapes[leaf][0])
    return found


def _own(mine: Found, leaf: Leaf, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    round, part, name = leaf
    total: Trees = (mine[round].sum.total if round in mine else None) or {}
    return total[part][name] if part in total else torch.zeros(shape, dtype=dtype, device=device)
