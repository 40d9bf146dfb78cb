"""A batch of examples, and what is made of it: the types that networks, losses and metrics share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Batch = dict[str, Tensor]
"""Fields by name, examples along the first dimension. ``mask`` (bool, one per example) marks the real ones of a
padded batch, and ``key`` (an int64 scalar) is what dropout draws from; both may be missing."""

Criterion = Callable[[Any, Batch], Tensor]
"""One loss per example, from a network's outputs and the batch."""
