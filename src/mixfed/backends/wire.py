"""What server and client say to each other, as bytes: trees of tensors and a small header, in one safetensors block.

Reading never runs code. A block of t tensors whose paths have c characters in all weighs its tensors and at most
``FRAME + FRAME_PER_TENSOR·t + 2·c`` bytes more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mixfed.core import tree
from mixfed.errors import InputError

FRAME = 1024
FRAME_PER_TENSOR = 128

Unpacked = tuple[dict[str, Any], dict[str, Any]]
"""A header and trees."""

_HEADER = "mixfed"


def pack(header: Mapping[str, Any], trees: Mapping[str, Any] | None = None) -> bytes:
    """A header and trees as bytes; the order of leaves is kept."""
    tensors: dict[str, Tensor] = {}
    paths: list[str] = []
    for path, x in tree.flatten(trees or {}).items():
        paths.append(path)
        if isinstance(x, Tensor):
            tensors[path] = x.detach().cpu().contiguous().clone()
    return save(tensors, {_HEADER: json.dumps({"header": header, "paths": paths})})


def unpack(block: bytes, device: torch.device | str = "cpu") -> Unpacked:
    """The header and the trees of :func:`pack`."""
    try:
        length = int.from_bytes(block[:8], "little")
        text = json.loads(block[8 : 8 + length])["__metadata__"][_HEADER]
        told = json.loads(text)
        tensors = load(block)
        flat: dict[str, Any] = {path: tensors[path].to(device) if path in tensors else {} for path in told["paths"]}
        return told["header"], tree.unflatten(flat)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError("What came over the wire is no message that mixfed wrote.") from error


def to_tensor(block: bytes) -> Tensor:
    """Bytes as a tensor, which a checkpoint can hold."""
    return torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.zeros(0, dtype=torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of :func:`to_tensor`."""
    return tensor.cpu().numpy().tobytes()


def overhead(trees: Mapping[str, Any]) -> int:
    """How many bytes :func:`pack` adds to the tensors of these trees, at most."""
    paths = tree.flatten(trees)
    return FRAME + FRAME_PER_TENSOR * len(paths) + 2 * sum(map(len, paths))
