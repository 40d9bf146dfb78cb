"""Objects of a running program under names that a recipe can hold: ``mixfed.experiments.objects:network_1f3c…``.

A recipe is text, and a network or a data set that somebody made in Python is not. So each gets a name with a
fingerprint of what it is. Another program that makes the same objects gets the same names, and can resume the run.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from mixfed.data.scenario import Scenario
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError

_KNOWN: dict[str, Any] = {}
_WHOLE = 1 << 26
"""Arrays of up to so many bytes are looked at whole; of larger ones, as many rows as make this up."""


def named(kind: str, fingerprint: str, found: Any) -> str:
    """Keeps what a recipe is to find (mostly a function that gives it), and returns the name for that."""
    name = f"{kind}_{fingerprint}"
    _KNOWN[name] = found
    return f"{__name__}:{name}"


def name_network(network: nn.Module) -> str:
    """A name for a network; every run begins with a copy of it as it is now."""
    kept = copy.deepcopy(network)
    state = {name: x.detach().cpu().float().numpy() for name, x in kept.state_dict().items()}
    return named("network", fingerprint([repr(kept), type(kept).__qualname__], state), lambda: copy.deepcopy(kept))


def name_scenario(scenario: Scenario) -> str:
    """A name for who holds what; it is the same for every seed."""
    parts: dict[str, NDArray[Any]] = {}
    sets: dict[str, FederatedData | CentralData | None] = {f"own {name}": data for name, data in scenario.own.items()}
    sets |= {"clients": scenario.clients, "test": scenario.test}
    sets |= {"centre": scenario.central, "validation": scenario.validation}
    for name, data in sets.items():
        if data is not None:
            parts |= {f"{name}/{field}": x for field, x in data.arrays.items()}
            parts |= {f"{name}/offsets": data.offsets} if isinstance(data, FederatedData) else {}
    return named("data", fingerprint([], parts), lambda: scenario)


def name_function(kind: str, function: Callable[..., Any]) -> str:
    """A name for a criterion, by its own name and its code."""
    return named(kind, _of_code(function), function)


def name_shown(kind: str, function: Callable[..., Any]) -> str:
    """The same for a metric or an algorithm, which results and tables call by its own name: this one ends with it."""
    called = getattr(function, "__name__", type(function).__name__)
    if not callable(function) or not called.isidentifier():
        what = "lambda" if callable(function) else called
        raise InputError(f"The {kind} is a name or a function with a name (def), and not a {what}.")
    return f"{named(kind, _of_code(function), SimpleNamespace(**{called: function}))}.{called}"


def plain(value: Any) -> Any:
    """Settings with numbers of numpy as numbers of Python, which alone a recipe holds."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _of_code(function: Callable[..., Any]) -> str:
    """A fingerprint of a function's name and its code."""
    code = getattr(function, "__code__", None)
    words = [
        getattr(function, "__qualname__", type(function).__qualname__),
        *(map(str, code.co_consts) if code else ()),
    ]
    return fingerprint([*words, code.co_code.hex() if code else ""], {})


def fingerprint(words: Iterable[str], arrays: Mapping[str, NDArray[Any]]) -> str:
    """A short text that differs where words or arrays differ."""
    found = hashlib.blake2b(digest_size=8)
    for word in words:
        found.update(word.encode() + b"\0")
    for name, x in sorted(arrays.items()):
        found.update(f"{name} {x.dtype} {x.shape}".encode())
        found.update(np.ascontiguousarray(_some(x)).tobytes())
    return found.hexdigest()


def _some(x: NDArray[Any]) -> NDArray[Any]:
    if x.nbytes <= _WHOLE or not len(x):
        return x
    rows = max(1, _WHOLE // (x.nbytes // len(x) or 1))
    return x[np.linspace(0, len(x) - 1, rows).astype(np.int64)]


def of_arrays(given: Any, whose: str) -> CentralData:
    """Central data as it is, or made of a mapping of arrays."""
    if not isinstance(given, Mapping | CentralData):
        told = f"The {whose} examples are a dictionary of arrays, such as {{'x': …, 'y': …}}, or CentralData"
        raise InputError(f"{told}, not a {type(given).__name__}.")
    try:
        return CentralData.from_arrays(given) if isinstance(given, Mapping) else given
    except InputError as error:
        raise InputError(f"The {whose} examples are refused: {error}") from error


def __getattr__(name: str) -> Any:
    """What a recipe asks for by a name that was given here."""
    if name not in _KNOWN:
        raise AttributeError(name)
    return _KNOWN[name]
