"""Pickles of numbers, text, lists and arrays, read without calling anything that they name.

A pickle is a program: Python's own reader runs whatever functions it asks for, and NumPy's, given a state that it did
not write itself, can crash. Here every opcode is looked at in turn. What a pickle wants built is only noted down, and
arrays are made from their bytes after type and shape were checked.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMPY = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
}
_TYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"}
_NOTHING = {"PROTO", "FRAME"}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


@dataclass
class _Noted:
    """What a pickle asks for: the name of a function or class, and, once it is called, arguments and state."""

    name: str
    arguments: Any = None
    state: Any = None


def read(content: bytes) -> dict[str, Any]:
    """The dictionary that a pickle holds, with text as its keys; :func:`array` makes the arrays in it."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in _TUPLES:
            stack.append(tuple(_popped(stack, _TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(_since_mark(stack)))
        elif name in ("APPEND", "APPENDS"):
            items = _popped(stack, 1) if name == "APPEND" else _since_mark(stack)
            _last(stack, list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = _popped(stack, 2) if name == "SETITEM" else _since_mark(stack)
            _last(stack, dict).update({_text(k): v for k, v in zip(items[::2], items[1::2], strict=True)})
        elif name == "GLOBAL":
            stack.append(_asked(_text(argument)))
        elif name == "STACK_GLOBAL":
            stack.append(_asked(" ".join(map(_text, _popped(stack, 2)))))
        elif name == "REDUCE":
            function, arguments = _popped(stack, 2)
            stack.append(_Noted(_last([function], _Noted).name, arguments))
        elif name == "BUILD":
            (state,) = _popped(stack, 1)
            _last(stack, _Noted).state = state
        elif name == "STOP":
            found: dict[str, Any] = _last(stack, dict)
            return found
        elif name not in _NOTHING:
            raise ValueError(f"it has the instruction {name}, which no file of arrays needs")
    raise ValueError("it ends too early")


def array(value: Any) -> NDArray[Any]:
    """A list of whole numbers, or an array that a pickle asks for, as an array."""
    if isinstance(value, list):
        if not all(type(number) is int and abs(number) < 1 << 63 for number in value):
            raise ValueError("a list must hold whole numbers")
        return np.array(value, np.int64)
    if not isinstance(value, _Noted) or value.name != "array":
        raise ValueError("a list of numbers or an array is missing")
    _, shape, kind, fortran, raw = value.state
    if not isinstance(kind, _Noted) or kind.name != "dtype":
        raise ValueError("an array has no type")
    code, order = _text(kind.arguments[0]), _text(kind.state[1])
    if code not in _TYPES or order not in ("<", ">", "|", "="):
        raise ValueError("an array is not of plain numbers")
    dtype, raw = np.dtype(order + code), raw.encode("latin-1") if isinstance(raw, str) else raw
    if not isinstance(raw, bytes) or len(shape) > 8 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("an array has no bytes or no shape")
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {list(shape)} and type {dtype} has {len(raw):,} bytes")
    return np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C")


def _asked(name: str) -> _Noted:
    if name not in _NUMPY:
        raise ValueError(f"it asks for {name.replace(' ', '.')}, which no file of arrays needs")
    return _Noted(_NUMPY[name])


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if not isinstance(value, str):
        raise ValueError("a name is no text")
    return value


def _last(stack: list[Any], kind: type) -> Any:
    if not stack or not isinstance(stack[-1], kind):
        raise ValueError("its instructions do not fit together")
    return stack[-1]


def _popped(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise ValueError("its instructions do not fit together")
    taken = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    return taken


def _since_mark(stack: list[Any]) -> list[Any]:
    start = next((place for place in reversed(range(len(stack))) if stack[place] is _MARK), None)
    if start is None:
        raise ValueError("its instructions do not fit together")
    taken = stack[start + 1 :]
    del stack[start:]
    return taken
