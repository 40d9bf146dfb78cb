"""Products of many networks, each with a weight of its own, in one operator: oneDNN's grouped convolution.

A convolution with windows of one pixel is a matrix product whose rows are the pixels, and its groups are networks. To
ask for it takes some 15 µs, whatever its size, and then it is three times as fast as ``torch.bmm`` where networks have
few rows. Weights are put in the order in which it reads them once (:func:`pack`), and used in every step of a sequence.

Rows come first here: inputs are [rows, N, in] and answers [rows, N, out], with weights [N, out, in]. The functions
without a check of their own can be part of TorchScript.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAYS = 2_000_000
"""FLOPs of the products of all networks from which on asking for it takes less time than it saves."""

AVAILABLE = hasattr(torch.ops.mkldnn, "_convolution_pointwise_") and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
"""Whether there are such products."""


def pays(rows: int, weight: Tensor) -> bool:
    """Whether products of so many rows with these weights are oneDNN's."""
    return (
        2 * rows * weight.numel() >= PAYS
        and AVAILABLE
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
    )


def pack(weight: Tensor, rows: int) -> Tensor:
    """The weights as oneDNN reads them, for products with so many rows."""
    networks, out, inner = weight.shape
    packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
        weight.reshape(networks * out, inner, 1, 1), [0, 0], [1, 1], [1, 1], networks, [1, networks * inner, 1, rows]
    )
    return packed


def image(x: Tensor) -> Tensor:
    """Rows as the pixels of one picture, whose channels come last in memory."""
    return x.view(1, 1, x.shape[0], -1).permute(0, 3, 1, 2)


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x·weightᵀ + bias [N·out]."""
    found: Tensor = torch.ops.mkldnn._convolution_pointwise(
        image(x), packed, bias, [0, 0], [1, 1], [1, 1], x.shape[1], "none", [], ""
    )
    return found.permute(0, 2, 3, 1).reshape(x.shape[0], x.shape[1], -1)


def add_product_(to: Tensor, x: Tensor, packed: Tensor) -> Tensor:
    """to + x·weightᵀ, in the place of ``to``."""
    torch.ops.mkldnn._convolution_pointwise_(
        image(to), image(x), packed, None, [0, 0], [1, 1], [1, 1], x.shape[1], "add", 1, None, [], None
    )
    return to
