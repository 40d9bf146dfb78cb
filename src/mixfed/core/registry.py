"""Optimizers and criteria by name; their modules are imported when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mixfed.deferred import Deferred

if TYPE_CHECKING:
    from torch import Tensor

    from mixfed.core.optim import Optimizer

OPTIMIZERS: dict[str, Deferred[Optimizer]] = {
    name: Deferred("mixfed.core.optim", name) for name in ("sgd", "adam", "yogi", "adagrad")
}
CRITERIA: dict[str, Deferred[Tensor]] = {
    name: Deferred("mixfed.core.losses", name)
    for name in ("cross_entropy", "binary_cross_entropy", "squared_error", "hinge")
}
