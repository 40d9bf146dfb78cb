"""Which values parameters take, said in their annotations: ``mu: NotNegative``.

The functions themselves refuse others (:func:`within_ranges`). The schema of recipes reads the same annotations, from
the text where a module needs PyTorch, and so refuses a recipe before anything slow is loaded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from numbers import Real
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from mixfed.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Range:
    """Values for which ``holds``, which are called ``wanted`` in a sentence."""

    wanted: str
    holds: Callable[[Any], bool]

    def has(self, value: Any) -> bool:
        """Whether it is one of these; a truth value is no number, and no number is infinite."""
        if isinstance(value, bool) or (isinstance(value, Real) and not math.isfinite(value)):
            return False
        try:
            return bool(self.holds(value))
        except (TypeError, ValueError):
            return False


NotNegative = Annotated[float, Range("at least 0", lambda x: x >= 0)]
Positive = Annotated[float, Range("a number above 0", lambda x: x > 0)]
Share = Annotated[float, Range("a share from 0 to 1", lambda x: 0 <= x <= 1)]
SomeShare = Annotated[float, Range("above 0 and at most 1", lambda x: 0 < x <= 1)]
PartOfOne = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x < 1)]
Count = Annotated[int, Range("at least 1", lambda x: x >= 1)]
CountOrNone = Annotated[int, Range("at least 0", lambda x: x >= 0)]
CountOrChosen = Annotated[int, Range("at least 1, or 0 to have it chosen", lambda x: x >= 0)]
Bits = Annotated[int, Range("8 or 32", lambda x: x in (8, 32))]
Finite = Annotated[float, Range("a finite number", lambda x: isinstance(x, Real))]


@dataclass(frozen=True)
class Rule:
    """What several arguments must be for each other: ``holds`` takes them by their names, else ``told`` is said."""

    told: str
    holds: Callable[..., bool]

    def check(self, given: dict[str, Any]) -> None:
        """Refuses arguments that break the rule, with its sentence; where some are missing it cannot say."""
        names = [*inspect.signature(self.holds).parameters]
        if given.keys() >= set(names) and not self.holds(*(given[name] for name in names)):
            raise InputError(self.told)


def check_range(value: Any, hint: Any, what: str) -> None:
    """Refuses a value, or one of a sequence, that is out of the range in its annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is not None:
            check_range(value, next(a for a in arguments if a is not type(None)), what)
    elif origin is Annotated:
        for wanted in arguments[1:]:
            if isinstance(wanted, Range) and not wanted.has(value):
                raise InputError(f"{what} must be {wanted.wanted}, not {value!r}.")
    elif origin is tuple or (inspect.isclass(origin) and issubclass(origin, Sequence)):
        _check_each(value, arguments, what)


def _check_each(values: Any, hints: Sequence[Any], what: str) -> None:
    if get_origin(hints[0]) is not Annotated:
        return
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise InputError(f"{what} must be several numbers, not {values!r}.")
    if len(hints) > 1 and Ellipsis not in hints and len(values) != len(hints):
        raise InputError(f"{what} must be {len(hints)} numbers, not {values!r}.")
    for value in values:
        check_range(value, hints[0], f"Each of {what}")


def within_ranges(*rules: Rule) -> Callable[[F], F]:
    """A function, or a class, that refuses arguments out of the ranges in its annotations, or against these rules."""

    def decorate(made: F) -> F:
        if inspect.isclass(made):
            made.__init__ = _checked(made.__init__, made.__name__, rules)  # type: ignore[method-assign]
            return made
        return _checked(made, made.__name__, rules)

    return decorate


def _checked(function: F, name: str, rules: Sequence[Rule]) -> F:
    parameters = inspect.signature(function).parameters
    names = [*parameters]
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    hints: dict[str, Any] = {}

    @wraps(function)
    def checked(*positional: Any, **named: Any) -> Any:
        if not hints:  # found with the first call: a module may define what its annotations name further down
            hints.update(get_type_hints(function, include_extras=True))
        given = dict(zip(names, positional, strict=False)) | named
        for argument, value in given.items():
            check_range(value, hints.get(argument), f"'{argument}' of {name}")
        for rule in rules:
            rule.check(defaults | given)
        return function(*positional, **named)

    checked.__rules__ = rules  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]
