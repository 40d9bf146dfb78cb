"""Optimizers by name; their module is imported when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mixfed.deferred import Deferred

if TYPE_CHECKING:
    from mixfed.core.optim import Optimizer

OPTIMIZERS: dict[str, Deferred[Optimizer]] = {
    name: Deferred("mixfed.core.optim", name) for name in ("sgd", "adam", "yogi", "adagrad")
}
