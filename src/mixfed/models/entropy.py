"""Cross-entropy under vmap: classes that lie side by side in memory stay there.

PyTorch wants the classes of ``F.cross_entropy`` in the second dimension. Where they are last, as in the answers at
every position of a sequence, its rule for vmap copies all of them into that order, their gradient back, and looks up
the labels in a dozen operators. Here rows of classes are taken in the order in which they are in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixfed.models import vmap

_OPERATOR = torch.ops.aten.cross_entropy_loss.default
_EACH = 0
"""PyTorch's number for a reduction that leaves every loss as it is."""
_registered: list[Any] = []


def judge_under_vmap() -> None:
    """Gives PyTorch this rule, for this process."""
    if _registered or vmap.MISSING:
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _registered.append(library)
    library.impl("cross_entropy_loss", _rule, "FuncTorchBatched", allow_override=True)


def _rule(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """The losses of class numbers. Where these are weighted, smoothed, added up or wrong, it is left to PyTorch."""
    plain = weight is None and not label_smoothing and reduction == _EACH and not target.is_floating_point()
    if not plain or input.ndim < 2 or target.shape != (input.shape[0], *input.shape[2:]):
        return _OPERATOR.decompose(input, target, weight, reduction, ignore_index, label_smoothing)
    return vmap.beneath(lambda given: _losses(*given, ignore_index), (input, target))


def _losses(input: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Of inputs [clients, batch, classes, …] and targets [clients, batch, …], which both stay in their order."""
    rows = input.movedim(2, -1)
    order = sorted(range(target.ndim), key=rows.stride, reverse=True)
    logs = F.log_softmax(rows.permute(*order, -1), -1)
    wanted = target.permute(order)
    found = F.nll_loss(logs.flatten(0, -2), wanted.flatten(), reduction="none", ignore_index=ignore_index)
    return found.view(wanted.shape).permute(sorted(range(len(order)), key=order.__getitem__))
