"""Codecs: a tree of tensors in fewer bytes, and back.

An encoded tree is again a tree of tensors (integers, indices, scales), so that its bytes are counted like any other's.
All is written in plain tensor operations and runs under ``torch.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mixfed import rng
from mixfed.core.tree import Params
from mixfed.errors import InputError


@dataclass(frozen=True)
class Codec:
    """``encode(tree, key)`` and ``decode(encoded, like)``, where ``like`` gives names, shapes and precision."""

    name: str
    encode: Callable[[Params, Tensor], Params]
    decode: Callable[[Params, Params], Params]


def quantize(bits: int = 8) -> Codec:
    """Stochastic quantisation (QSGD-like, one scale per tensor) to signed integers of 8 or 4 bits.

    With s = max|x| / (2^(bits−1) − 1), x/s is rounded up with a probability equal to its fraction, else down, so that
    the expectation of the decoded value is x. Two 4-bit numbers share a byte.
    """
    if bits not in (4, 8):
        raise InputError(f"Quantisation is to 8 or 4 bits, not {bits}.")
    levels = (1 << (bits - 1)) - 1

    def encode(tree: Params, key: Tensor) -> Params:
        encoded: Params = {}
        for name, x in tree.items():
            flat = x.reshape(-1).float()
            scale = flat.abs().amax() / levels
            elements = torch.arange(flat.numel(), device=x.device)
            scaled = flat / torch.where(scale > 0, scale, 1.0)
            own_key = key + rng.key(0, f"leaf/{name}")  # by its name, whatever the order of the leaves
            rounded = torch.floor(scaled + rng.tensor_uniform(own_key, elements)).clamp(-levels, levels).to(torch.int8)
            encoded[f"{name}:integers"] = rounded if bits == 8 else _pack(rounded)
            encoded[f"{name}:scale"] = scale
        return encoded

    def decode(encoded: Params, like: Params) -> Params:
        decoded = {}
        for name, x in like.items():
            integers = encoded[f"{name}:integers"]
            whole = integers if bits == 8 else _unpack(integers, x.numel())
            decoded[name] = (whole.float() * encoded[f"{name}:scale"]).reshape(x.shape).to(x.dtype)
        return decoded

    return Codec(f"{bits}-bit quantisation", encode, decode)


def top_k(share: float) -> Codec:
    """Sparsification: of every tensor only the ``share`` of entries with the largest |x| travels, with its index."""
    if not 0 < share <= 1:
        raise InputError(f"Top-k keeps a share above 0 and at most 1 of the entries, not {share}.")

    def kept(shape: torch.Size) -> int:
        return max(1, round(share * prod(shape)))

    def encode(tree: Params, key: Tensor) -> Params:
        encoded: Params = {}
        for name, x in tree.items():
            flat = x.reshape(-1)
            indices = torch.topk(flat.abs(), kept(x.shape)).indices
            encoded[f"{name}:indices"] = indices.to(torch.int32)
            encoded[f"{name}:values"] = flat[indices]
        return encoded

    def decode(encoded: Params, like: Params) -> Params:
        decoded = {}
        for name, x in like.items():
            empty = torch.zeros(x.numel(), dtype=x.dtype, device=x.device)
            indices = encoded[f"{name}:indices"].long()
            decoded[name] = empty.scatter(0, indices, encoded[f"{name}:values"]).reshape(x.shape)
        return decoded

    return Codec(f"top {share:.3%}", encode, decode)


def _pack(integers: Tensor) -> Tensor:
    """Pairs of 4-bit numbers in −8..7 as bytes."""
    shifted = (integers + 8).to(torch.uint8)
    if shifted.shape[0] % 2:
        shifted = torch.cat([shifted, torch.zeros_like(shifted[:1])])
    return shifted[0::2] * 16 + shifted[1::2]


def _unpack(packed: Tensor, count: int) -> Tensor:
    both = torch.stack([packed // 16, packed % 16], dim=-1).reshape(-1)[:count]
    return both.to(torch.int8) - 8
