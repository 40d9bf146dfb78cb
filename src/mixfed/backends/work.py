"""One client's work in a round: what the simulator's loop does for each client, and what a device does for itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches
from mixfed.core.layout import channels_last, images_of_steps
from mixfed.models.parts import AUXILIARY
from mixfed.transforms.rows.select import RowDelivery


def client_work(
    algorithm: Algorithm, message: Message, private: Private, batches: Batches, picked: RowDelivery | None = None
) -> tuple[Upload, Private]:
    """Trains a client on its batches; gives its upload as it travels, and what it keeps.

    ``picked`` are its rows of tables, if these travel by rows. The message of a network with convolutions is one that
    :func:`as_convolved` gave.
    """
    if picked:
        message, batches = picked.given(message), picked.batches
    if algorithm.model.has_convolutions:
        batches = replace(batches, fields=images_of_steps(batches.fields))
        private = {part: channels_last(leaves) for part, leaves in private.items()}
    upload, private = algorithm.client(message, private, batches)
    return (replace(upload, values=picked.trimmed(upload.values), rows=picked.ids) if picked else upload), private


def norm_of(upload: Upload, private: Private) -> float:
    """The norm ‖v‖ of all that a client sends up.

    It is not finite where a number in the upload, in its weight or in what the client keeps is not finite.
    """
    alone = tree.map_leaves(lambda x: x[None], {"up": upload.values, "weight": upload.weight, "kept": private})
    return norms_of(Upload(alone["up"], alone["weight"]), alone["kept"])[0]


def norms_of(upload: Upload, private: Private, real: Mapping[str, Tensor] | None = None) -> list[float]:
    """The same for each client of a chunk; of a table in ``real`` only the rows [clients, n] count that it marks.

    Zero times a sum is zero exactly where all its terms are finite (and the sum can hold them).
    """
    others = sum((x.reshape(len(x), -1).sum(1) for x in tree.leaves(private)), upload.weight)
    norms = (_norms(upload, real or {}, lambda x: torch.linalg.vector_norm(x, dim=1)) + 0 * others).tolist()
    if math.isfinite(sum(norms)):
        return norms
    large = (_norms(upload, real or {}, _norm_of_large) + 0 * others).tolist()  # perhaps only squares were infinite
    return [norm if math.isfinite(norm) else other for norm, other in zip(norms, large, strict=True)]


def fits(norm: float, bound: float | None) -> bool:
    """Whether an update of this norm may be sent up."""
    return math.isfinite(norm) and (bound is None or norm <= bound)


def all_fit(norms: Sequence[float], bound: float | None) -> bool:
    """Whether all of these updates may be sent up; a sum is finite only where all its terms are."""
    return math.isfinite(sum(norms)) and (bound is None or max(norms, default=0.0) <= bound)


def _norms(upload: Upload, real: Mapping[str, Tensor], norm: Callable[[Tensor], Tensor]) -> Tensor:
    parts = []
    for leaves in upload.values.values():
        for name, x in leaves.items():
            x = x if x.dtype in (torch.float32, torch.float64) else x.float()
            if name in real:
                x = norm(x.flatten(0, 1).flatten(1)).view(x.shape[:2]).masked_fill(~real[name], 0)
            parts.append(norm(x.reshape(len(x), -1)))
    if len(parts) < 2:
        return parts[0] if parts else torch.zeros_like(upload.weight)
    return norm(torch.stack(parts, 1))


def _norm_of_large(x: Tensor) -> Tensor:
    """‖x‖ of each row, of numbers whose squares may be infinite."""
    x = x.double()
    scale = x.abs().sum(1).clamp(min=1)
    norm: Tensor = torch.linalg.vector_norm(x / scale[:, None], dim=1) * scale
    return norm


def keeps_parts(algorithm: Algorithm) -> bool:
    """Whether clients keep something from round to round."""
    return algorithm.personal is not None or bool(algorithm.own.first(algorithm.model.initial()))


def bytes_of_own(algorithm: Algorithm, private: Private) -> int:
    """What a client's own part of the model weighs, without auxiliary models; 0 where clients have none.

    Sent up once, the parts of all clients make a test on unknown devices possible.
    """
    if algorithm.personal is None:
        return 0
    common = algorithm.model.initial()
    own = algorithm.personal(common, private)
    return tree.nbytes({n: x for n, x in own.items() if x is not common.get(n) and not n.startswith(AUXILIARY)})


def as_convolved(message: Message) -> Message:
    """The message in the memory layout that convolutions like."""
    return replace(message, payload={k: channels_last(v) for k, v in message.payload.items()})
