"""Arithmetic on trees: plain (possibly nested) dictionaries whose leaves are tensors.

A model's parameters, a client's update, an optimizer's memory and a whole algorithm's state are all trees, so that
checkpointing, averaging and sending them are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
Tree = Mapping[str, Any]
"""Nested dictionaries of tensors and Python numbers."""


def add(a: Params, b: Params, scale: float = 1.0) -> Params:
    """a + scale·b on the names of b; names that only a has are passed through."""
    return {name: torch.add(x, b[name], alpha=scale) if name in b else x for name, x in a.items()}


def sub(a: Params, b: Params) -> Params:
    """a − b."""
    return {name: x - b[name] for name, x in a.items()}


def scale(a: Params, factor: float | Tensor) -> Params:
    """factor·a."""
    return {name: x * factor for name, x in a.items()}


def zeros(a: Params) -> Params:
    """A tree of zeros in the shape of a."""
    return {name: torch.zeros_like(x) for name, x in a.items()}


def clone(a: Params) -> Params:
    """A copy that shares no memory with a."""
    return {name: x.detach().clone() for name, x in a.items()}


def cast(a: Params, dtype: torch.dtype) -> Params:
    """Floating-point leaves in another precision; the same tensors where they already have it."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in a.items()}


def stack(trees: list[Params]) -> Params:
    """One tree with a new first dimension, an entry for each of the trees."""
    return {name: torch.stack([t[name] for t in trees]) for name in trees[0]}


def combine(trees: list[Params], coefficients: list[float]) -> Params:
    """Σ cₘ·treeₘ."""
    total = scale(trees[0], coefficients[0])
    for tree, c in zip(trees[1:], coefficients[1:], strict=True):
        for name in total.keys() & tree.keys():
            total[name].add_(tree[name], alpha=c)
    return total


def dot(a: Params, b: Params) -> Tensor:
    """⟨a, b⟩ over all leaves."""
    return torch.stack([(x * b[name]).sum() for name, x in a.items()]).sum()


def squared(a: Params) -> Tensor:
    """‖a‖² over all leaves, which may be in factors."""
    return torch.stack([torch.linalg.vector_norm(x).square() for x in a.values()]).sum()


def norm(a: Params) -> Tensor:
    """‖a‖₂ over all leaves."""
    return dot(a, a).sqrt()


def where(condition: Tensor, a: Any, b: Any) -> Any:
    """a where the condition (a scalar) holds, else b, leaf by leaf."""
    if isinstance(a, Mapping):
        return {name: where(condition, x, b[name]) for name, x in a.items()}
    return torch.where(condition, a, b)


def map_leaves(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with the function applied to every tensor; other leaves stay as they are."""
    if isinstance(tree, Mapping):
        return {name: map_leaves(function, x) for name, x in tree.items()}
    return function(tree) if isinstance(tree, Tensor) else tree


def to_device(tree: Any, device: torch.device) -> Any:
    """The tree on this device; the same tensors where they are there already."""
    return map_leaves(lambda x: x.to(device), tree)


def leaves(tree: Any) -> Iterator[Tensor]:
    """Every tensor of the tree, in order."""
    if isinstance(tree, Mapping):
        for x in tree.values():
            yield from leaves(x)
    elif isinstance(tree, Tensor):
        yield tree


def nbytes(tree: Any) -> int:
    """What the tensors of the tree weigh when sent."""
    return sum(x.numel() * x.element_size() for x in leaves(tree))


def flatten(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, names joined by '/': the form in which a tree is stored."""
    flat: dict[str, Any] = {}
    for name, x in tree.items():
        path = f"{prefix}{name}"
        if isinstance(x, Mapping) and x:
            flat.update(flatten(x, f"{path}/"))
        else:
            flat[path] = x
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`flatten`."""
    tree: dict[str, Any] = {}
    for path, x in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = x
    return tree
