"""Losses that need no data: what a regulariser asks of the parameters alone.

Ning et al. (2021), "Learning federated representations and recommendations with limited negatives": clients only pull
together what belongs together (the hinge loss), and a regulariser over the whole table pushes everything apart
(spreadout). The formulas are those of that paper's public code (google-research/federated, dual_encoder).
"""

from __future__ import annotations

from torch import Tensor

from mixfed.core.model import Loss
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.models.recommender import unit
from mixfed.ranges import NotNegative, within_ranges


def spreadout(table: Tensor) -> Tensor:
    """√(Σ_{i≠j} cos(eᵢ, eⱼ)²): how much the rows of a table [N, d] point in the same directions.

    With unit rows U, Σ_{i,j} (uᵢ·uⱼ)² = ‖U·Uᵀ‖² = ‖Uᵀ·U‖², so that no N × N matrix is formed: 2N·d² floating-point
    operations and memory N·d, where the pairs one by one take 2N²·d. Welch's bound: the sum is at least N²/d − N.
    """
    rows = unit(table)
    gram = rows.T @ rows
    return _root(gram.square().sum() - rows.square().sum(-1).square().sum())


def spreadout_by_pairs(table: Tensor, chunk: int = 1024) -> Tensor:
    """The same value from all pairs, as the paper counts it: 2N²·d operations, rows in chunks."""
    rows = unit(table)
    total = sum((part @ rows.T).square().sum() for part in rows.split(chunk))  # type: ignore[no-untyped-call]
    return _root(total - rows.square().sum(-1).square().sum())


def _root(x: Tensor) -> Tensor:
    return x.clamp(min=1e-12).sqrt()


@within_ranges()
def spreadout_of(table: str, scale: NotNegative, *, by_pairs: bool = False) -> Loss:
    """scale·spreadout of one parameter, as a loss that needs no data."""
    measure = spreadout_by_pairs if by_pairs else spreadout

    def loss(params: Params, batch: Batch) -> Tensor:
        return scale * measure(params[table])

    return loss
