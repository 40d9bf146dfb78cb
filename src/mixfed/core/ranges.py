"""Which numbers training takes, said without PyTorch: a recipe is refused by them before anything slow is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from mixfed.errors import InputError


def check_optimizer(learning_rate: Any, **options: Any) -> None:
    """Refuses the rate of an optimizer, and those of its options that are given, where they are no such numbers."""
    require(learning_rate, "A learning rate", "at least 0", lambda x: x >= 0)
    for name, value in options.items():
        if name == "betas":
            _check_betas(value)
        elif name in _OF_OPTIMIZERS:
            require(value, *_OF_OPTIMIZERS[name])
    if options.get("nesterov") and not options.get("momentum"):
        raise InputError("Nesterov's rule needs momentum above 0.")


def check_batching(batch_size: int, steps: int | None, epochs: int | None) -> None:
    """Refuses batches of which a round cannot be made; steps or epochs that are None are not asked for."""
    if batch_size < 0 or any(count is not None and count < 1 for count in (steps, epochs)):
        raise InputError("Batch size cannot be negative, and steps and epochs must be at least 1.")


def check_clip(clip: float | None) -> None:
    """Refuses a norm to which no gradient can be clipped; None is no bound."""
    if clip is not None and not clip > 0:
        raise InputError(f"Gradients can be clipped to a norm above 0, not to {clip}.")


def require(value: Any, what: str, wanted: str, holds: Callable[[float], bool]) -> None:
    """Refuses what is not a finite number, or not a wanted one."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not holds(float(value)):
        raise InputError(f"{what} is a number that is {wanted}, not {value!r}.")


def _check_betas(betas: Sequence[float]) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InputError(f"There are two betas, of the first and of the second moment, not {betas!r}.")
    for beta in betas:
        require(beta, "A beta", "at least 0 and below 1", _share)


def _share(value: float) -> bool:
    return 0 <= value < 1


_OF_OPTIMIZERS: dict[str, tuple[str, str, Callable[[float], bool]]] = {
    "momentum": ("Momentum", "at least 0 and below 1", _share),
    "weight_decay": ("Weight decay", "at least 0", lambda x: x >= 0),
    "decay": ("The decay of a learning rate", "above 0 and at most 1", lambda x: 0 < x <= 1),
    "inverse_decay": ("The inverse decay of a learning rate", "at least 0", lambda x: x >= 0),
    "epsilon": ("An optimizer's epsilon", "above 0", lambda x: x > 0),
    "initial": ("The second moment at the start", "at least 0", lambda x: x >= 0),
}
