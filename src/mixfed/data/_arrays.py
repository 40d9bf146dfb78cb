"""Named arrays that share their first dimension: what every store is made of, and the checks on it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mixfed.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Arrays = dict[str, NDArray[Any]]
Prepare = Callable[[dict[str, "Tensor"]], dict[str, "Tensor"]]
Rows = NDArray[np.int64]
Fields = Mapping[str, Union[ArrayLike, "Tensor"]]


def as_arrays(fields: Fields) -> Arrays:
    """Tensors, lists and arrays as NumPy arrays that torch can take over; nothing is copied without need."""
    return {name: as_array(name, values) for name, values in fields.items()}


def as_array(name: str, values: ArrayLike | Tensor) -> NDArray[Any]:
    """One field as an array of numbers in the byte order of this machine."""
    from torch import Tensor

    if isinstance(values, Tensor):
        try:
            return values.detach().cpu().numpy()
        except TypeError as error:
            raise InputError(f"field '{name}' is {values.dtype}, which NumPy lacks; convert it first") from error
    try:
        array = values if isinstance(values, np.memmap) else np.asarray(values)
    except ValueError as error:
        raise InputError(f"field '{name}' is ragged; pad its examples to one shape first") from error
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_keys(values: ArrayLike | Tensor, what: str) -> NDArray[Any]:
    """Whole numbers or text, which can be grouped; pandas and Arrow hand text over as objects."""
    keys = as_array(what, values)
    if keys.dtype.kind in "OT" and all(isinstance(key, str) for key in keys.flat):
        keys = keys.astype(np.str_)
    if keys.size and keys.dtype.kind not in "biuUS":
        raise InputError(f"{what} of type {keys.dtype} cannot be grouped; give whole numbers or text")
    return keys


def validate(arrays: Arrays, offsets: Rows | None = None, names: NDArray[Any] | None = None) -> int:
    """The number of examples, after checking that fields, offsets and names fit together."""
    if not arrays:
        raise InputError("there are no fields; give at least one array, usually 'x' and 'y'")
    for name, array in arrays.items():
        _validate_field(name, array)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
        raise InputError(f"fields differ in length ({told}); give one row per example in each")
    examples = next(iter(lengths.values()))
    if offsets is not None:
        _validate_offsets(offsets, examples)
        if names is not None and names.shape != (len(offsets) - 1,):
            raise InputError(f"names has shape {names.shape}; give one name for each of {len(offsets) - 1} clients")
    return examples


def _validate_field(name: str, array: NDArray[Any]) -> None:
    if not isinstance(name, str) or not name or name[0] == "." or any(mark in name for mark in "/\\:\0"):
        raise InputError(f"{name!r} is no field name; use a word such as 'x', without '/', '\\' or ':'")
    if array.dtype.kind in "US":
        told = f"field '{name}' has text in it ({array.dtype}); encode it as numbers first, such as with"
        raise InputError(f"{told} numpy.unique(…, return_inverse=True)")
    if array.dtype.kind not in "biufc":
        raise InputError(f"field '{name}' has type {array.dtype}; encode it as numbers first")
    if array.ndim == 0:
        raise InputError(f"field '{name}' is a single number; give an array with one row per example")


def _validate_offsets(offsets: Rows, examples: int) -> None:
    if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0:
        raise InputError("offsets must start with 0 and have one more entry than there are clients")
    shrinking = np.flatnonzero(np.diff(offsets) < 0)
    if len(shrinking):
        raise InputError(f"client {shrinking[0]} has a negative size; offsets must never decrease")
    if offsets[-1] != examples:
        raise InputError(f"offsets end at {offsets[-1]} but there are {examples} examples; make them equal")


def whole_numbers(values: ArrayLike, what: str) -> NDArray[np.int64]:
    """Values as int64, refusing anything that would change on the way (fractions, NaN, text)."""
    array = np.asarray(values)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind == "f" and (np.abs(array) < 2**63).all() and (array == np.floor(array)).all():
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or int(array.max()) >= 2**63:
        raise InputError(f"{what} must be whole numbers below 2^63, without NaN")
    return array.astype(np.int64, copy=False)


def indices(values: ArrayLike, limit: int, what: str) -> NDArray[np.int64]:
    """Positions below ``limit``, from whole numbers or from one True or False for each."""
    array = np.asarray(values)
    if array.dtype == np.bool_:
        if array.shape != (limit,):
            raise InputError(f"a mask of {what}s has shape {array.shape}; give one entry for each of {limit}")
        return np.flatnonzero(array).astype(np.int64)
    array = np.atleast_1d(whole_numbers(array, f"{what} numbers"))
    wrong = array[(array < 0) | (array >= limit)]
    if array.ndim != 1 or len(wrong):
        told = f"{what} {wrong.flat[0]} does not exist" if wrong.size else f"{what} numbers are no flat list"
        raise InputError(f"{told}; {what}s are numbered 0 to {limit - 1}")
    return array


def index(value: int, limit: int, what: str) -> int:
    """One position below ``limit``."""
    try:
        position = operator.index(value)
    except TypeError as error:
        raise InputError(f"{what} must be a whole number, not {value!r}") from error
    if not 0 <= position < limit:
        raise InputError(f"{what} {position} does not exist; {what}s are numbered 0 to {limit - 1}")
    return position


def take(arrays: Arrays, rows: Rows) -> Arrays:
    """The given rows of every field, copied."""
    return {name: np.asarray(array[rows]) for name, array in arrays.items()}


def offsets_of(sizes: NDArray[np.int64]) -> Rows:
    """Where each of consecutive stretches begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def stretches(starts: Rows, sizes: NDArray[np.int64]) -> Rows:
    """``start, start + 1, …`` for each (start, size), joined, without a loop over them."""
    offsets = offsets_of(sizes)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)


def groups_of(order: Rows, offsets: Rows) -> list[Rows]:
    """``order`` cut at ``offsets``."""
    return [order[start:end] for start, end in pairwise(offsets.tolist())]


def cumulative(fractions: Mapping[str, float]) -> NDArray[np.float64]:
    """Where each part of a split ends, between 0 and 1; the parts must be positive and sum to one."""
    values = list(fractions.values())
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise InputError(f"the parts of a split must be positive fractions, not {dict(fractions)}")
    if not math.isclose(sum(values), 1.0, abs_tol=1e-9):
        raise InputError(f"the parts of a split must sum to 1, but {dict(fractions)} sum to {sum(values):g}")
    return np.cumsum(values)


def join(parts: Sequence[Arrays]) -> Arrays:
    """Several sets of fields one after the other; they must agree in fields, types and example shapes."""
    first = parts[0]
    for number, part in enumerate(parts):
        if part.keys() != first.keys():
            told = f"dataset {number} has fields {sorted(part)}, not {sorted(first)} as dataset 0"
            raise InputError(f"{told}; make them equal")
        for name, array in part.items():
            if array.shape[1:] != first[name].shape[1:] or array.dtype != first[name].dtype:
                raise InputError(
                    f"field '{name}' of dataset {number} holds {array.dtype} {array.shape[1:]}, "
                    f"not {first[name].dtype} {first[name].shape[1:]} as dataset 0; make them equal"
                )
    return {name: np.concatenate([part[name] for part in parts]) for name in first}
