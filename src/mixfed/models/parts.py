"""A network in parts: the local representation ℓ, the global g on top of it, and an auxiliary model beside g.

The auxiliary model a_m looks at the representation h = ℓ(x) as g does, and is private to the client like ℓ: its
parameters are simply more of those that do not travel. In evaluation the network is g ∘ ℓ and a_m is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixfed import rng
from mixfed.data.batch import Batch, Criterion
from mixfed.errors import InputError
from mixfed.models.networks import mlp

Task = Callable[[Any, Tensor, Batch], Tensor]
"""One loss per example from the network in parts, the representation and the batch."""

AUXILIARY, ENCODER = "auxiliary.", "encoder."
"""How the names of the parameters of an auxiliary model, and of ℓ, begin."""

ORDERS = list(permutations(range(4)))
"""The 24 ways to lay out four quarters of an image."""


class Parts(nn.Module):
    """``encoder`` is ℓ, ``head`` is g, ``auxiliary`` is a_m. While training, a batch gives (logits, task losses)."""

    def __init__(self, encoder: nn.Module, head: nn.Module, auxiliary: nn.Module, task: Task) -> None:
        super().__init__()
        self.encoder, self.head, self.auxiliary = encoder, head, auxiliary
        self.task = task

    def forward(self, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """Logits, and while training also the auxiliary task's loss of every example."""
        h = self.encoder(batch["x"])
        logits: Tensor = self.head(h)
        return (logits, self.task(self, h, batch)) if self.training else logits


def cut(network: nn.Module, layers: int) -> tuple[nn.Sequential, nn.Sequential]:
    """A sequential network as (ℓ, g), where ℓ has the first ``layers`` layers with parameters and what follows them."""
    if not isinstance(network, nn.Sequential):
        raise InputError("Only a sequential network can be cut into a representation and what is on top of it.")
    starts = [i for i, module in enumerate(network) if next(module.parameters(), None) is not None]
    if not 1 <= layers < len(starts):
        raise InputError(
            f"A network of {len(starts)} layers is cut after 1 to {len(starts) - 1} of them, not {layers}."
        )
    modules = list(network)
    return nn.Sequential(*modules[: starts[layers]]), nn.Sequential(*modules[starts[layers] :])


def with_auxiliary(
    network: nn.Module, example: Tensor, kind: str, *, layers: int, classes: int, hidden: Sequence[int], dropout: float
) -> Parts:
    """The network with an auxiliary model on the representation of its first ``layers`` layers.

    ``example`` is one input, ``classes`` the outputs of a supervised task or of an adversary.
    """
    if kind not in TASKS:
        raise InputError(f"There is no auxiliary model '{kind}'; choose from {', '.join(TASKS)}.")
    encoder, head = cut(network, layers)
    if kind in ("rotation", "jigsaw") and (example.ndim < 2 or example.shape[-1] != example.shape[-2]):
        raise InputError(f"The auxiliary task '{kind}' needs square images, not inputs of shape {list(example.shape)}.")
    if kind == "jigsaw" and example.shape[-1] % 2:
        raise InputError("A jigsaw of four pieces needs images with an even number of rows.")
    with torch.no_grad():
        width = encoder.eval()(example[None]).flatten(1).shape[1]
    outputs = {"autoencoder": example.numel(), "rotation": 4, "jigsaw": len(ORDERS)}.get(kind, classes)
    return Parts(encoder.train(), head, mlp(width, outputs, hidden, dropout), TASKS[kind])


def summed(criterion: Criterion, weight: float) -> Criterion:
    """L_g + weight·L_a while training; L_g in evaluation."""

    @wraps(criterion)
    def together(outputs: Tensor | tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        if isinstance(outputs, tuple):
            return criterion(outputs[0], batch) + weight * outputs[1]
        return criterion(outputs, batch)

    return together


def first_only(criterion: Criterion) -> Criterion:
    """L_g alone, whether there are auxiliary losses or not."""

    @wraps(criterion)
    def first(outputs: Tensor | tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        return criterion(outputs[0] if isinstance(outputs, tuple) else outputs, batch)

    return first


def supervised(parts: Any, h: Tensor, batch: Batch) -> Tensor:
    """The labels once more, from a classifier of the client's own."""
    return F.cross_entropy(parts.auxiliary(h), batch["y"].long(), reduction="none")


def autoencoder(parts: Any, h: Tensor, batch: Batch) -> Tensor:
    """The input, reconstructed from the representation: the mean squared error."""
    apart: Tensor = parts.auxiliary(h) - batch["x"].flatten(1)
    return apart.square().mean(1)


def rotation(parts: Any, h: Tensor, batch: Batch) -> Tensor:
    """By how many quarter turns an image was turned."""
    x = batch["x"]
    turns = _draw(batch, 4)
    turned = torch.stack([torch.rot90(x, k, (-2, -1)) for k in range(4)], dim=1)
    return _recognise(parts, _pick(turned, turns), turns)


def jigsaw(parts: Any, h: Tensor, batch: Batch) -> Tensor:
    """In which of 24 orders the four quarters of an image were laid."""
    x = batch["x"]
    order = _draw(batch, len(ORDERS))
    half = x.shape[-1] // 2
    quarters = [x[..., i : i + half, j : j + half] for i in (0, half) for j in (0, half)]
    laid = [
        torch.cat([torch.cat([quarters[a], quarters[b]], -1), torch.cat([quarters[c], quarters[d]], -1)], -2)
        for a, b, c, d in ORDERS
    ]
    return _recognise(parts, _pick(torch.stack(laid, dim=1), order), order)


def adversary(parts: Any, h: Tensor, batch: Batch) -> Tensor:
    """The protected attributes, each yes or no: the mean cross-entropy over them."""
    logits: Tensor = parts.auxiliary(h)
    wanted = batch["protected"].to(logits.dtype).reshape(logits.shape)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(1)


TASKS: dict[str, Task] = {
    "supervised": supervised,
    "autoencoder": autoencoder,
    "rotation": rotation,
    "jigsaw": jigsaw,
    "adversary": adversary,
}


def _recognise(parts: Any, images: Tensor, truth: Tensor) -> Tensor:
    return F.cross_entropy(parts.auxiliary(parts.encoder(images)), truth, reduction="none")


def _draw(batch: Batch, choices: int) -> Tensor:
    """One of the choices for every example, a function of the batch's key."""
    examples = torch.arange(len(batch["x"]), device=batch["x"].device)
    draw = rng.tensor_uniform(batch["key"] + _PURPOSE, examples) * choices
    return draw.long().clamp(max=choices - 1)


def _pick(versions: Tensor, chosen: Tensor) -> Tensor:
    """Of [batch, versions, …] the chosen version of every example."""
    index = chosen.view(-1, 1, *(1,) * (versions.ndim - 2)).expand(-1, 1, *versions.shape[2:])
    return versions.gather(1, index)[:, 0]


_PURPOSE = 0x5851F42D4C957F2D
