"""Out of vmap and back: work that has a better way to treat a chunk of clients than one operator after another.

Under vmap a tensor stands for one client's, and what it is made of, [clients, …], can only be had through PyTorch's
internals (``torch._C._functorch``, which its own libraries use too) or slowly. All that touches them is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from torch._C import (
        _dispatch_tls_local_exclude_set,
        _dispatch_tls_local_include_set,
        _ForceDispatchKeyGuard,
    )
    from torch._C._functorch import (
        CVmapInterpreterPtr,
        TransformType,
        _add_batch_dim,
        _remove_batch_dim,
        _vmap_decrement_nesting,
        _vmap_increment_nesting,
        current_level,
        get_unwrapped,
        is_functorch_wrapped_tensor,
        maybe_get_bdim,
        maybe_get_level,
        peek_interpreter_stack,
        pop_dynamic_layer_stack,
        push_dynamic_layer_stack,
    )
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
    from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]
except ImportError as error:
    MISSING: str | None = f"PyTorch {torch.__version__} lacks what this needs of its internals ({error.name or error})"
else:
    _ordinary = _dispatch_tls_local_include_set(), _dispatch_tls_local_exclude_set()  # how plain tensors are dispatched
    MISSING = None
"""Why cohorts cannot be batched with this version of PyTorch, or None; clients then run one by one."""

Params = dict[str, Tensor]


def beneath(function: Callable[[Any], Any], given: Any) -> Any:
    """function(given) under vmap, but with plain tensors that have a first dimension over clients; so has its result.

    ``given`` is a tree of tensors, at least one of which is each client's own; the others are repeated for all of them.
    What autograd records beneath vmap includes this, also where it is called by PyTorch as a rule of vmap, in which the
    tape is shut out; what torch.func differentiates does not.
    """
    level = current_level()
    size = _clients_of(given, level)

    def plain(x: Tensor) -> Tensor:
        if maybe_get_level(x) != level:
            return x.expand(size, *x.shape)
        return get_unwrapped(x).movedim(maybe_get_bdim(x), 0)

    with temporarily_pop_interpreter_stack(), _ForceDispatchKeyGuard(*_ordinary):
        found = function(_each_leaf(plain, given))
    return _each_leaf(lambda x: _add_batch_dim(x, 0, level), found)


def beneath_at(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    """The same for a single tensor, in a tenth of the time; None where x is not each client's own."""
    if maybe_get_level(x) != current_level():
        return None
    plain = get_unwrapped(x).movedim(maybe_get_bdim(x), 0)
    with temporarily_pop_interpreter_stack():
        found = function(plain)
    return _add_batch_dim(found, 0, current_level())


@dataclass(frozen=True)
class Info:
    """What a rule of vmap is told, as PyTorch's own would."""

    batch_size: int


def applied(function: type[torch.autograd.Function], *given: Any) -> Any:
    """function.apply(*given). Where clients' vmap is all that is active, the function's rule is asked right away, which
    leaves out what PyTorch does around it for other arguments: that takes longer than a small step."""
    active = peek_interpreter_stack() if MISSING is None else None
    if active is None or active.level() != 1 or active.key() != TransformType.Vmap:
        return function.apply(*given)  # type: ignore[no-untyped-call]
    own = [isinstance(x, Tensor) and maybe_get_level(x) == 1 for x in given]
    places = tuple(maybe_get_bdim(x) if each else None for x, each in zip(given, own, strict=True))
    plain = (get_unwrapped(x) if each else x for x, each in zip(given, own, strict=True))
    with outside():
        if not any(own):
            return function.apply(*plain)  # type: ignore[no-untyped-call]
        found, led = function.vmap(Info(CVmapInterpreterPtr(active).batchSize()), places, *plain)
    if isinstance(found, Tensor):
        return _add_batch_dim(found, led, 1)
    return tuple(x if place is None else _add_batch_dim(x, place, 1) for x, place in zip(found, led, strict=True))


def is_active() -> bool:
    """Whether anything is being vmapped or differentiated by torch.func right now."""
    return MISSING is None and peek_interpreter_stack() is not None


def made_of(x: Tensor) -> tuple[Tensor, bool]:
    """The plain tensor that x stands for under vmap and grad, and whether its first dimension is over clients."""
    each = False
    while is_functorch_wrapped_tensor(x):
        bdim, x = maybe_get_bdim(x), get_unwrapped(x)
        if bdim > 0:
            with outside():
                x = x.movedim(bdim, 0)
        each = each or bdim >= 0
    return x, each


def each(x: Tensor) -> Tensor:
    """What stands under vmap for x, whose first dimension is over clients; the inverse of :func:`made_of`."""
    return _add_batch_dim(x, 0, current_level())


def is_at_this_level(x: Tensor) -> bool:
    """Whether x is a plain tensor, or stands for each client's under the innermost vmap and nothing else."""
    return not is_functorch_wrapped_tensor(x) or (maybe_get_level(x) == current_level() and maybe_get_bdim(x) >= 0)


def clients_alone(tree: Any) -> int:
    """Of how many clients these tensors are, where their vmap is all that is active; else 0."""
    return _clients_of(tree, 1) if is_active() and current_level() == 1 else 0


def of_each(x: Tensor, clients: int) -> Tensor:
    """The plain tensor [clients, …] that x stands for under their vmap; what is everyone's is repeated."""
    plain, each = made_of(x)
    with outside():
        return plain if each else plain.expand(clients, *plain.shape)


class outside:  # noqa: N801
    """While active, operations are on plain tensors, as if there were no vmap or grad."""

    __slots__ = ("_layers",)

    def __enter__(self) -> None:
        self._layers: list[Any] = []
        while peek_interpreter_stack() is not None:
            self._layers.append(pop_dynamic_layer_stack())

    def __exit__(self, *error: object) -> None:
        while self._layers:
            push_dynamic_layer_stack(self._layers.pop())


def for_each(function: Callable[..., Tensor], *trees: Params) -> Tensor:
    """torch.vmap of a function of flat trees, without its care for other arguments, which takes longer than a small
    model's step."""
    size = len(next(x for leaves in trees for x in leaves.values()))
    level = _vmap_increment_nesting(size, "error")
    try:
        found = function(*({n: _add_batch_dim(x, 0, level) for n, x in leaves.items()} for leaves in trees))
        return _remove_batch_dim(found, level, size, 0)
    finally:
        _vmap_decrement_nesting()


def over_clients(function: Callable[..., tuple[Any, ...]], size: int, *trees: Any) -> tuple[Any, ...]:
    """The same for nested trees of so many clients, which is also what the function gives."""

    def wrapped(x: Any) -> Any:
        return {n: wrapped(leaf) for n, leaf in x.items()} if isinstance(x, dict) else _add_batch_dim(x, 0, level)

    def unwrapped(x: Any) -> Any:
        if isinstance(x, dict):
            return {n: unwrapped(leaf) for n, leaf in x.items()}
        return _remove_batch_dim(x, level, size, 0)

    lazy_load_decompositions()
    level = _vmap_increment_nesting(size, "error")
    try:
        return tuple(unwrapped(x) for x in function(*(wrapped(x) for x in trees)))
    finally:
        _vmap_decrement_nesting()


def _each_leaf(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The function of every tensor in nested dictionaries and tuples."""
    if isinstance(tree, dict):
        return {name: _each_leaf(function, x) for name, x in tree.items()}
    return tuple(_each_leaf(function, x) for x in tree) if isinstance(tree, tuple) else function(tree)


def _clients_of(tree: Any, level: int) -> int:
    """How many clients there are, as the first tensor tells that is each one's own; 0 where there is none."""
    if isinstance(tree, dict | tuple):
        each = tree.values() if isinstance(tree, dict) else tree
        return next((size for size in (_clients_of(x, level) for x in each) if size), 0)
    return int(get_unwrapped(tree).shape[maybe_get_bdim(tree)]) if maybe_get_level(tree) == level else 0
