"""Random numbers of a forward pass as a function of a key: every client has its own, and every executor the same.

PyTorch draws from one global generator, in the order in which clients happen to run: a resumed run finds it in another
state, and a vmapped cohort cannot give each client the numbers it would have had alone. While :class:`KeyedDraws` is
active, dropout and the usual functions that draw take their numbers from (key, how many draws came before, element)
instead. The module needs no change. An element is known by its coordinates, whatever the size of the tensor, so that
padding at a batch's end changes nothing, wherever a network has the dimension of examples.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from mixfed import rng
from mixfed.errors import InputError
from mixfed.models.vmap import outside

_ELEMENTWISE = {F.dropout, torch.dropout}
_CHANNELWISE = {F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout}
_REFUSED = {F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout}

_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_LOOKUPS = {F.embedding, F.embedding_bag}
_PRECISION = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}
"""Bits of a significand; of all other types as many as of float32, 24."""


class KeyedDraws(TorchFunctionMode):
    """Replaces functions that draw by keyed ones for the duration of a ``with`` block; ``met`` tells if any was used.

    With ``watch`` it refuses what draws from a global generator all the same, which takes some time.
    """

    def __init__(self, key: Tensor | None, *, watch: bool = False) -> None:
        super().__init__()
        self.key = key
        self.watch = watch
        self.draws = 0
        self.met = False

    def __enter__(self) -> KeyedDraws:
        self._others = _other_generators() if self.watch else None
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and self.watch and _other_generators() != self._others:
            raise InputError(
                "The network takes Python's or NumPy's random numbers in its forward pass, which no two runs share;"
                " draw with torch.rand or torch.randn instead."
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _REFUSED:
            raise InputError("Alpha dropout cannot be drawn per client; use nn.Dropout instead.")
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or (len(args) > 4 and args[4])):
            raise InputError("Dropout inside scaled_dot_product_attention cannot be drawn per client; set it to 0.")
        if func in _LOOKUPS and (args[3] if len(args) > 3 else kwargs.get("max_norm")) is not None:
            raise InputError(RENORMALISED)
        if func in _ELEMENTWISE or func in _CHANNELWISE:
            self.met = True
            return self._drop(*args, channels=func in _CHANNELWISE, **kwargs)
        if func in KEYED:
            self.met = True
            if kwargs.pop("generator", None) is not None or kwargs.get("out") is not None:
                raise InputError(f"{_name(func)} draws per client without 'generator' and 'out'; leave them out.")
            return KEYED[func](self, *args, **kwargs)
        return self._watched(func, args, kwargs) if self.watch else func(*args, **kwargs)

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = _torch_generators()
        try:
            found = func(*args, **kwargs)
        except RuntimeError as error:
            if "called random operation" in str(error):  # vmap's own words
                raise _cannot(func) from error
            raise
        if _torch_generators() != before:
            raise _cannot(func)
        return found

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1) in the shape and the type of another tensor."""
        digits = _PRECISION.get(like.dtype, 24)
        return ((self._bits(like) >> (64 - digits)) & ((1 << digits) - 1)).to(like.dtype) * (1.0 / (1 << digits))

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers, by Box and Muller's transform of two uniform ones."""
        wide = _wide(like)
        radius = torch.sqrt(-2 * torch.log1p(-self.uniform(wide)))
        return (radius * torch.cos(2 * math.pi * self.uniform(wide))).to(like.dtype)

    def whole(self, like: Tensor, low: int, high: int) -> Tensor:
        """Whole numbers from ``low`` to ``high`` − 1."""
        return (low + ((self._bits(like) >> 1) & ((1 << 62) - 1)) % (high - low)).to(like.dtype)

    def _bits(self, like: Tensor) -> Tensor:
        if self.key is None:
            raise InputError(
                "A model that draws random numbers trains on batches that carry a 'key' to draw them from."
            )
        elements = rng.tensor_counters(like.shape, self.draws << 40, like.device)
        bits = rng.tensor_bits(self.key.to(like.device), elements)
        self.draws += 1
        return bits

    def _drop(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
        *,
        channels: bool,
    ) -> Tensor:
        if not (training if train is None else train) or p == 0.0:
            return input
        shape = (*input.shape[:2], *(1,) * (input.ndim - 2)) if channels else tuple(input.shape)
        keep = self.uniform(torch.empty(shape, device=input.device)) >= p
        return input * keep.to(input.dtype) / (1.0 - p if p < 1.0 else 1.0)


def _rand(draw: KeyedDraws, *size: Any, **options: Any) -> Tensor:
    return _asked(draw.uniform(torch.empty(*size, **options)), options)


def _rand_like(draw: KeyedDraws, input: Tensor, **options: Any) -> Tensor:
    return _asked(draw.uniform(torch.empty_like(input, **options)), options)


def _randn(draw: KeyedDraws, *size: Any, **options: Any) -> Tensor:
    return _asked(draw.normal(torch.empty(*size, **options)), options)


def _randn_like(draw: KeyedDraws, input: Tensor, **options: Any) -> Tensor:
    return _asked(draw.normal(torch.empty_like(input, **options)), options)


def _randint(draw: KeyedDraws, *args: Any, **options: Any) -> Tensor:
    given = list(args)
    size = options.pop("size") if "size" in options else given.pop()
    high = options.pop("high") if "high" in options else given.pop()
    low = options.pop("low", given.pop() if given else 0)
    return draw.whole(torch.empty(size, **{"dtype": torch.int64} | options), low, high)


def _randint_like(draw: KeyedDraws, input: Tensor, *args: int, **options: Any) -> Tensor:
    given = list(args)
    high = options.pop("high") if "high" in options else given.pop()
    low = options.pop("low", given.pop() if given else 0)
    return draw.whole(torch.empty_like(input, **options), low, high)


def _bernoulli(draw: KeyedDraws, input: Tensor, p: float | None = None) -> Tensor:
    return (draw.uniform(_wide(input)) < (input if p is None else p)).to(input.dtype)


def _normal(draw: KeyedDraws, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    """torch.normal, whose numbers pass no gradient on."""
    if size is None:
        like: Tensor = mean + std
    else:
        like = torch.empty(size, **options)
    found: Tensor = mean + std * draw.normal(like)
    return found.detach()


def _bernoulli_(draw: KeyedDraws, tensor: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return _into(tensor, draw.uniform(_wide(tensor)) < p, Tensor.bernoulli_)


def _uniform_(draw: KeyedDraws, tensor: Tensor, *args: float, **options: float) -> Tensor:
    ends = {"from": 0.0, "to": 1.0} | dict(zip(("from", "to"), args, strict=False)) | options
    return _into(tensor, ends["from"] + (ends["to"] - ends["from"]) * draw.uniform(tensor), Tensor.uniform_)


def _normal_(draw: KeyedDraws, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _into(tensor, mean + std * draw.normal(tensor), Tensor.normal_)


def _exponential_(draw: KeyedDraws, tensor: Tensor, lambd: float = 1.0) -> Tensor:
    return _into(tensor, -torch.log1p(-draw.uniform(_wide(tensor))) / lambd, Tensor.exponential_)


KEYED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch.rand: _rand,
    torch.rand_like: _rand_like,
    torch.randn: _randn,
    torch.randn_like: _randn_like,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.bernoulli: _bernoulli,
    torch.normal: _normal,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
}
"""Functions that draw, and what draws in their place, with the same parameters."""

RENORMALISED = (
    "An embedding with max_norm changes its table in the forward pass, and with it the server's parameters;"
    " leave max_norm out."
)


def _asked(values: Tensor, options: dict[str, Any]) -> Tensor:
    return values.requires_grad_() if options.get("requires_grad") else values


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _into(tensor: Tensor, values: Tensor, func: Callable[..., Any]) -> Tensor:
    try:
        return tensor.copy_(values)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise InputError(
            f"{_name(func)} fills a tensor that all clients share; draw with torch.rand or torch.randn instead."
        ) from error


def _name(func: Callable[..., Any]) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func))


def _cannot(func: Callable[..., Any]) -> InputError:
    if func in _RECURRENT:
        return InputError(
            "Dropout between recurrent layers cannot be drawn per client where sequences are packed, states are"
            " projected or the layer's class is derived from PyTorch's; set it to 0."
        )
    return InputError(
        f"The network calls {_name(func)} in its forward pass, whose random numbers cannot be drawn per client;"
        " draw with torch.rand, randn, randint, bernoulli or nn.Dropout instead."
    )


def _torch_generators() -> list[bytes]:
    """The states of PyTorch's generators, which every draw changes."""
    with outside():
        found = [torch.default_generator.get_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found += torch.cuda.get_rng_state_all()
        return [state.numpy().tobytes() for state in found]


def _other_generators() -> tuple[Any, str]:
    return random.getstate(), str(np.random.get_state(legacy=False))


def draws_by_layers(module: nn.Module) -> bool:
    """Whether the module has dropout, in layers of its own or between recurrent ones; refuses what cannot be drawn per
    client."""
    for child in module.modules():
        if isinstance(child, nn.MultiheadAttention) and child.dropout:
            raise InputError("Dropout inside nn.MultiheadAttention cannot be drawn per client; set it to 0.")
    return any(
        (isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0) or (isinstance(m, nn.RNNBase) and m.dropout > 0)
        for m in module.modules()
    )
