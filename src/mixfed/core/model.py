"""A ``torch.nn.Module`` seen as a function of its parameters.

The module is only a template: parameters come from outside at every call, so one copy per thread serves any number
of clients.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mixfed.core import tree
from mixfed.core.device import usable_device
from mixfed.core.tree import Params
from mixfed.data.batch import Batch, Criterion
from mixfed.data.meaning import UNKNOWN, Meaning
from mixfed.errors import InputError
from mixfed.models.attention import attend_under_vmap
from mixfed.models.draws import RENORMALISED, KeyedDraws, draws_by_layers
from mixfed.models.entropy import judge_under_vmap
from mixfed.models.recurrent import for_cohorts

IDLE = "idle"
"""A field of batches without examples whose loss is nothing, so that a step does only what it does to parameters that
examples leave alone."""

Loss = Callable[[Params, Batch], Tensor]
Forward = Callable[[nn.Module, Batch], Any]
Buffers = Literal["average", "private", "server", "frozen"]


class Model:
    """A module, its loss, and what of it trains and travels.

    ``criterion(outputs, batch)`` gives one loss per example; ``forward(module, batch)`` says how the module is called.
    ``trainable`` picks parameters by name (left out: all that require a gradient); the others are frozen, stay in the
    module and never travel. Patterns in ``frozen`` (``"body.*"``) freeze parameters and float buffers alike.

    Float buffers (BatchNorm's statistics) follow the policy ``buffers``: "average" sends them down and averages what
    comes up, "private" keeps each client's own on the client, "server" sends the server's down and discards the
    clients', "frozen" leaves them as they are. A BatchNorm with frozen statistics uses them in training too. Integer
    buffers are never averaged and never travel: every call finds them as they are in the module given here.

    ``tables`` names the parameters that are only looked up by ids, with the fields of the examples that hold these ids
    (-1: padding), such as ``{"embedding.weight": ["x", "y"]}``; it allows row exchange, and changes nothing by itself.
    A module may say both itself: ``module.on_batch(batch)`` how it is called, and ``module.tables``.

    ``meaning`` says what its answers stand for: the names of classes, the unit of measurements.

    With ``dtype=torch.bfloat16`` the model travels and trains in 16 bits; the server's copy and all sums stay in 32.
    """

    def __init__(
        self,
        module: nn.Module,
        criterion: Criterion,
        *,
        forward: Forward | None = None,
        trainable: Callable[[str], bool] | None = None,
        frozen: Sequence[str] = (),
        buffers: Buffers = "average",
        tables: Mapping[str, Sequence[str]] | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        meaning: Meaning = UNKNOWN,
    ) -> None:
        if buffers not in get_args(Buffers):
            raise InputError(f"The buffer policy is '{buffers}'; choose average, private, server or frozen.")
        if dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise InputError(f"Models train in float32, float64 or bfloat16, not in {dtype}.")
        _check_given(module, criterion)
        self.device = usable_device(device)
        self.dtype = dtype
        self.criterion = criterion
        self.meaning = meaning
        self.buffer_policy: Buffers = buffers
        self._forward: Forward = forward or _default_forward(module)
        self.takes_x = forward is None and not hasattr(module, "on_batch")
        """Whether the module is called with the field "x" of a batch alone."""
        self.stochastic: bool | None = draws_by_layers(module) or None  # None: not known before the first training pass
        self._watched = False
        frozen_names = _frozen(module, frozen, buffers)
        self._resting = frozenset(
            name for name in _batch_norms(module) if f"{name}.running_mean".lstrip(".") in frozen_names
        )
        self.has_batch_norm = any(name not in self._resting for name in _batch_norms(module))
        self.has_convolutions = any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())

        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.momentum is None for m in module.modules()):
            raise InputError("BatchNorm with momentum=None averages over all batches of its life; give it a momentum.")

        if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None for m in module.modules()):
            raise InputError(RENORMALISED)

        attend_under_vmap()
        judge_under_vmap()
        master = for_cohorts(copy.deepcopy(module)).requires_grad_(False)
        chosen = trainable or {n for n, p in module.named_parameters() if p.requires_grad}.__contains__
        initial = {n: p for n, p in master.named_parameters() if chosen(n) and n not in frozen_names}
        if not initial:
            raise InputError("No parameter of the module is trainable; freeze less of it.")
        for name, parameter in initial.items():
            if not parameter.numel():
                raise InputError(
                    f"The parameter '{name}' has the shape {list(parameter.shape)}, so it holds nothing to train; give"
                    " every layer a width of at least 1."
                )
        statistics = {n: b for n, b in master.named_buffers() if b.is_floating_point() and n not in frozen_names}
        self.trainable = tuple(initial)
        self.buffers = tuple(statistics)
        tables = getattr(module, "tables", {}) if tables is None else tables
        self.tables = _checked_tables(tables, self.trainable)
        self.shapes = {n: tuple(x.shape) for n, x in (initial | statistics).items()}
        keep = torch.promote_types(dtype, torch.float32)
        self._initial = {n: x.to(self.device, keep, copy=True) for n, x in (initial | statistics).items()}
        self._template = master.to(self.device, dtype)
        self._local = threading.local()

    def network(self) -> nn.Module:
        """The module as it was given, on this model's device and in its precision."""
        return self._template

    def numbers(self, without: Container[str] = ()) -> int:
        """How many numbers parameters and float buffers hold, but for those of these names."""
        return sum(math.prod(shape) for n, shape in self.shapes.items() if n not in without)

    def initial(self) -> Params:
        """A copy of the starting parameters and float buffers, in the server's precision."""
        return tree.clone(self._initial)

    def module(self) -> nn.Module:
        """A copy of the module, with its starting parameters."""
        return copy.deepcopy(self._template)

    def trained(self, params: Params) -> Params:
        """The trainable leaves of the parameters."""
        return {name: params[name] for name in self.trainable}

    def outputs(self, params: Params, batch: Batch, *, training: bool) -> Any:
        """The module's answer; ``params`` holds parameters and buffers, and BatchNorm writes into those buffers."""
        with self._drawing(batch, training):
            return self._answer(params, batch, training)

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """The mean of the criterion over the real examples of the batch, in training mode; zero where none is."""
        if batch.keys() <= {"key", "mask", IDLE}:
            return torch.zeros((), device=self.device, dtype=self.dtype)
        return masked_mean(self.losses(params, batch, training=True), batch.get("mask"))

    def losses(self, params: Params, batch: Batch, *, training: bool) -> Tensor:
        """The criterion, one number per example."""
        with self._drawing(batch, training):
            return self._judged(self._answer(params, batch, training), batch)

    def losses_of(self, outputs: Any, batch: Batch) -> Tensor:
        """The criterion in training mode, one number per example, where the network's answer is known."""
        with self._drawing(batch, training=True):
            return self._judged(outputs, batch)

    def _judged(self, outputs: Any, batch: Batch) -> Tensor:
        values = self.criterion(outputs, batch)
        if values.ndim != 1:
            raise InputError(
                f"A criterion gives one loss per example, shape [batch], but this one gave {list(values.shape)};"
                " use reduction='none' and average over all but the first dimension."
            )
        return values

    def _answer(self, params: Params, batch: Batch, training: bool) -> Any:
        bound = self._bound(training)
        if self.dtype != torch.float32:
            batch = {n: x.to(self.dtype) if x.is_floating_point() else x for n, x in batch.items()}
        with bound.using(params):
            return self._forward(bound.module, batch)

    def _drawing(self, batch: Batch, training: bool) -> AbstractContextManager[None]:
        """While active, random numbers come from the batch's key; nothing is done where there are none to draw."""
        return nullcontext() if not training or self.stochastic is False else self._keyed(batch)

    @contextmanager
    def _keyed(self, batch: Batch) -> Iterator[None]:
        with KeyedDraws(batch.get("key"), watch=not self._watched) as draws:
            yield
        self._watched = True
        self.stochastic = self.stochastic or draws.met

    def _bound(self, training: bool) -> _Bound:
        copies: dict[bool, _Bound] = self._local.__dict__.setdefault("copies", {})
        if training not in copies:
            copies[training] = _Bound(self._template, training, self._resting)
        return copies[training]


class _Bound:
    """A copy of the template's structure (its tensors are shared) whose parameters can be swapped quickly."""

    def __init__(self, template: nn.Module, training: bool, resting: Container[str]) -> None:
        shared = [*template.parameters(), *(b for b in template.buffers() if b.is_floating_point())]
        self.module = copy.deepcopy(template, {id(t): t for t in shared}).train(training)
        for name, layer in self.module.named_modules():
            if name in resting:
                layer.eval()
        names = {id(t): n for n, t in [*self.module.named_parameters(), *self.module.named_buffers()]}
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = defaultdict(list)
        for child in self.module.modules():
            for store in (child._parameters, child._buffers):
                for leaf, tensor in store.items():
                    if tensor is not None:
                        self._places[names[id(tensor)]].append((store, leaf))
        self._own = {name: places[0][0][places[0][1]] for name, places in self._places.items()}
        self._integers = [n for n, b in self.module.named_buffers() if not b.is_floating_point()] if training else []

    def using(self, params: Params) -> _Swap:
        fresh = {name: self._own[name].clone() for name in self._integers}
        return _Swap(self._places, self._own, params | fresh if fresh else params)


class _Swap:
    """Puts parameters in their places and afterwards the template's back, so that nothing of a client lingers."""

    def __init__(
        self, places: dict[str, list[tuple[dict[str, Any], str]]], own: dict[str, Any], params: Params
    ) -> None:
        self.places, self.own, self.params = places, own, params

    def __enter__(self) -> None:
        self._put(self.params)

    def __exit__(self, *error: object) -> None:
        self._put({name: self.own[name] for name in self.params})

    def _put(self, tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            for store, leaf in self.places[name]:
                store[leaf] = tensor


def _check_given(module: nn.Module, criterion: Criterion) -> None:
    if not isinstance(module, nn.Module):
        kind = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise InputError(f"A model takes a network, which is an object of torch.nn.Module, and not {kind}.")
    check_criterion(criterion)


def check_criterion(criterion: Criterion) -> None:
    """Refuses what is no function of outputs and a batch, such as a loss of torch."""
    of_torch = getattr(criterion, "__module__", "").startswith("torch.nn")
    if of_torch or not callable(criterion):
        name = getattr(criterion, "__name__", type(criterion).__name__)
        raise InputError(
            f"A criterion takes outputs and a batch and gives a loss for each example, which {name} does not; take"
            " mixfed.cross_entropy, mixfed.binary_cross_entropy or mixfed.squared_error, or write such a function."
        )


def _batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def _frozen(module: nn.Module, patterns: Sequence[str], buffers: Buffers) -> frozenset[str]:
    """The names of parameters and float buffers that match a pattern, or are buffers where all of these are frozen."""
    statistics = [n for n, b in module.named_buffers() if b.is_floating_point()]
    names = [n for n, _ in module.named_parameters()] + statistics
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            told = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise InputError(f"Nothing in the network is named '{pattern}', so it cannot be frozen; there is {told}.")
    matched = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return frozenset(matched | set(statistics if buffers == "frozen" else ()))


def _default_forward(module: nn.Module) -> Forward:
    if hasattr(module, "on_batch"):
        return lambda module, batch: module.on_batch(batch)  # type: ignore[operator]
    return lambda module, batch: module(batch["x"])


def _checked_tables(tables: Mapping[str, Sequence[str]], trainable: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Tables by name; those that share a field of ids must share all of them, so that ids can be renumbered."""
    checked = {name: tuple(fields) for name, fields in tables.items()}
    for name, fields in checked.items():
        if name not in trainable:
            raise InputError(f"The table '{name}' is not a trainable parameter; there are {', '.join(trainable)}.")
        if not fields or isinstance(tables[name], str):
            raise InputError(f"The table '{name}' needs a list of the fields whose ids index it.")
        for other, others in checked.items():
            if others != fields and set(others) & set(fields):
                raise InputError(f"The tables '{name}' and '{other}' share a field of ids; give both the same fields.")
    return checked


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of the values whose mask is set; zero where none is."""
    if mask is None:
        return values.mean()
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
