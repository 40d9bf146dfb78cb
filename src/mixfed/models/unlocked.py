"""Loops that hold no lock of Python, so that several threads run them at once.

Each of many small operators takes the interpreter's lock: threads that train different clients would wait for each
other more than they work. TorchScript runs a whole loop without it. PyTorch wants it to be replaced by its compiler,
which takes half a minute for a recurrent loop; where a version of PyTorch lacks it, the same functions run as Python,
and a warning says so.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_scripting = threading.Lock()
_log = logging.getLogger("mixfed")


def without_lock(function: Callable[P, R]) -> Callable[P, R]:
    """The function in TorchScript, from its first call on."""
    made: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _scripting:
            if not made:
                made.append(_scripted(function))
        return made[0](*args, **kwargs)

    return call


def _scripted(function: Callable[P, R]) -> Callable[P, R]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # see above
        try:
            return torch.jit.script(function)
        except (AttributeError, RuntimeError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            _log.warning(
                "Recurrent steps and products run as Python, one thread at a time: no TorchScript here (%s).", why
            )
            return function
