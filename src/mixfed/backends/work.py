"""One client's work in a round: what the simulator's loop does for each client, and what a device does for itself."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from mixfed.core import tree
from mixfed.core.algorithm import Algorithm, Message, Private, Upload
from mixfed.core.batches import Batches
from mixfed.core.tree import Params
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
        batches = replace(batches, fields=_channels_last(batches.fields, steps=True))
        private = {part: _channels_last(leaves) for part, leaves in private.items()}
    upload, private = algorithm.client(message, private, batches)
    return (replace(upload, values=picked.trimmed(upload.values), rows=picked.ids) if picked else upload), private


def is_finite(upload: Upload, private: Private, *, batched: bool = False) -> Tensor:
    """Whether values, weight and private parts are finite; ``batched``: of each client of a chunk.

    A sum is finite exactly where all its terms are (and it can hold them), so that one number is looked at.
    """
    return all_finite({"up": upload.values, "weight": upload.weight, "kept": private}, batched=batched)


def all_finite(everything: tree.Tree, *, batched: bool = False) -> Tensor:
    """Whether all numbers of a tree are finite."""
    sums = [x.reshape(len(x), -1).sum(1) if batched else x.sum() for x in tree.leaves(everything)]
    if not sums:
        return torch.tensor(True)
    dtype = reduce(torch.promote_types, {x.dtype for x in sums})
    return torch.isfinite(torch.stack([x.to(dtype) for x in sums]).sum(0))


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
    return replace(message, payload={k: _channels_last(v) for k, v in message.payload.items()})


def _channels_last(params: Params, *, steps: bool = False) -> Params:
    """Image-shaped tensors in the memory layout that CPU convolutions like; the values are the same."""
    if steps:  # [steps, batch, channels, height, width]: every step's batch on its own
        return {n: _each_channels_last(x) if x.ndim == 5 else x for n, x in params.items()}
    return {n: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for n, x in params.items()}


def _each_channels_last(x: Tensor) -> Tensor:
    """Even where one channel makes both layouts the same, the strides tell convolutions which one to go on with."""
    y = x.flatten(0, 1).clone(memory_format=torch.channels_last)
    return y.as_strided(x.shape, (x.shape[1] * y.stride(0), *y.stride()))
