"""What recommendation adds: the hinge loss on clients, the spreadout regulariser, recall@k, and the paper's ledger.

Ning et al. (2021), "Learning federated representations and recommendations with limited negatives": clients only pull
together what belongs together (hinge), and a regulariser over the whole table pushes everything apart (spreadout).
The formulas are those of that paper's public code (google-research/federated, dual_encoder).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mixfed.core.model import Loss
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.errors import InputError
from mixfed.models.recommender import unit

MARGIN = 0.9


def hinge(outputs: Tensor, batch: Batch) -> Tensor:
    """max(0, 0.9 − score of the item that followed)²; outputs are that score, or the scores of all items."""
    scores = outputs if outputs.ndim == 1 else _of_following(outputs, batch)[:, 0]
    return (MARGIN - scores).clamp(min=0).square()


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


def spreadout_of(table: str, scale: float, *, by_pairs: bool = False) -> Loss:
    """scale·spreadout of one parameter, as a loss that needs no data."""
    if not scale >= 0:
        raise InputError(
            f"The spreadout regulariser cannot have the scale {scale}; give a number that is not negative."
        )
    measure = spreadout_by_pairs if by_pairs else spreadout

    def loss(params: Params, batch: Batch) -> Tensor:
        return scale * measure(params[table])

    return loss


def rank(outputs: Tensor, batch: Batch) -> Tensor:
    """How many items do not stand behind the one that followed, which those of a lower score do, and equal ones of a
    higher id. A score that is not a number stands behind nothing; one that is not finite is itself behind everything.
    """
    score, ids = _of_following(outputs, batch), batch["y"].long()[:, None]
    level = (outputs == score) & (torch.arange(outputs.shape[1], device=outputs.device) >= ids)
    places = ((outputs < score) | level).sum(1).neg() + outputs.shape[1]
    return torch.where(score[:, 0].isfinite(), places, torch.iinfo(places.dtype).max)


def _of_following(outputs: Tensor, batch: Batch) -> Tensor:
    """Of the scores of all items that of the one that followed, [batch, 1]."""
    ids = batch["y"].long()[:, None]
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= outputs.shape[1]):
        wrong = ids[(ids < 0) | (ids >= outputs.shape[1])][0]
        raise InputError(
            f"An example has the label {int(wrong)}, and the model scores the items 0 to {outputs.shape[1] - 1} only."
        )
    return outputs.gather(1, ids)


@dataclass(frozen=True)
class Recall:
    """recall@k: whether the item that followed is among the k of highest score, of all items."""

    k: int

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        if outputs.ndim != 2:
            raise InputError(f"recall@{self.k} needs the scores of all items, shape [batch, items].")
        return (rank(outputs, batch) < self.k).float()


@dataclass(frozen=True)
class ClosedForm:
    """Table 12 of Augenstein et al. (2022): cost of one client in one round, by method, next to what was measured.

    N items of width d in one shared table, n of which a client's K batches of B examples touch. Values are counted in
    numbers; ``bytes_per_value`` turns them into bytes. The paper's Table 3 (494, 20, 30 KB; 125.16 and 0.025 MFLOP) is
    this with N 3,952, d 16, n = K·B = 160, KiB of four-byte values, and the FLOPs of a single step.
    """

    items: int
    width: int
    rows: float
    steps: int
    batch: int
    bytes_per_value: int = 4

    def bytes(self, method: str) -> float:
        """2Nd for the baseline, 2nd for Parallel Training, 3nd for gradient transfer."""
        values = {
            "baseline": 2 * self.items,
            "parallel": 2 * self.rows,
            "gradient_1way": 3 * self.rows,
            "gradient_2way": 3 * self.rows,
        }
        if method not in values:
            raise InputError(f"Table 12 has no method '{method}'; it has {', '.join(values)}.")
        return values[method] * self.width * self.bytes_per_value

    def regulariser(self, method: str) -> float:
        """K·N²·d/2 on every client for the baseline, nothing on clients with mixed learning."""
        return self.steps * self.items**2 * self.width / 2 if method == "baseline" else 0.0

    def server_regulariser(self, method: str) -> float:
        """N²·d/2 at the server in a round of mixed learning, nothing for the baseline."""
        return 0.0 if method == "baseline" else self.items**2 * self.width / 2

    def step_flops(self, method: str) -> float:
        """One step as section C.3 counts it: Bd + 3Bd² + 3B²d + 2B, and N²d/2 + 3Nd where the client regularises.

        C.3 writes Nd for the regulariser's gradient; the figure of Table 3 takes 3Nd.
        """
        b, d, n = self.batch, self.width, self.items
        own = b * d + 3 * b * d**2 + 3 * b**2 * d + 2 * b
        return own + (n**2 * d / 2 + 3 * n * d if method == "baseline" else 0)
