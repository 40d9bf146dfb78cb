"""From tables (TOML) to typed dataclasses and back, with one sentence for everything that does not fit.

A section is a dataclass. A section may also choose a function by name (an optimizer, a network, a partitioner): then
it has a field ``options`` that says by which key, and the function's own signature says which further keys the
section takes, of which type, with which default. So no function needs a second description of its parameters.
"""

from __future__ import annotations

import difflib
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mixfed.errors import InputError
from mixfed.experiments.signatures import Parameter, parameters_of, rules_of, takes_any_key
from mixfed.ranges import check_range

T = TypeVar("T")
Table = dict[str, Any]
_SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


types_of: Callable[[Any], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))
"""The type of every field of a section, found once: a table asks for them hundreds of times."""


Own = Callable[[str, str], Callable[..., Any]]
"""Finds a function of the user's own by its name (``"file.py:Name"``); a key is told where there is none."""


def is_own(name: Any) -> bool:
    """Whether a name in a recipe is that of something of the user's own."""
    return isinstance(name, str) and ":" in name


def options_of(
    by: str,
    choices: Callable[[], Mapping[str, Callable[..., Any]]],
    hidden: Iterable[str] = (),
    *,
    or_own: bool = False,
    left_open: Iterable[str] = (),
) -> dict[str, Any]:
    """Metadata of the field ``options`` of a section whose key ``by`` names one of ``choices()``.

    Parameters in ``hidden`` are not for recipes to set. With ``or_own`` the key may name a function of the user's own.
    Defaults of parameters in ``left_open`` are not written out, because something else may determine them.
    """
    open_keys = frozenset(left_open)
    return {"by": by, "choices": choices, "hidden": frozenset(hidden), "or_own": or_own, "left_open": open_keys}


def parameters(function: Callable[..., Any], hidden: Iterable[str] = ()) -> dict[str, Parameter]:
    """The parameters of a function that a TOML value can give, but for the hidden ones."""
    found = parameters_of(function)
    return {name: parameter for name, parameter in found.items() if name not in hidden and _expressible(parameter.hint)}


def read(cls: type[T], table: Mapping[str, Any], own: Own, known: Sequence[str] = (), path: str = "") -> T:
    """The dataclass that a table describes, complete with defaults; ``known`` are all keys of the whole recipe."""
    known = known or keys(cls, table, own)
    hints = types_of(cls)
    values: dict[str, Any] = {}
    plain, chooser = _fields(cls)
    for item in plain:
        if is_dataclass(hints[item.name]):
            section = table.get(item.name, {})
            if not isinstance(section, Mapping):
                raise InputError(f"'{path}{item.name}' is a section of the recipe, not a single value.")
            values[item.name] = read(hints[item.name], section, own, known, f"{path}{item.name}.")
        elif item.name in table:
            values[item.name] = check(table[item.name], hints[item.name], path + item.name)
    rest = {key: value for key, value in table.items() if key not in {item.name for item in plain}}
    if chooser is not None:
        values["options"] = _read_options(cls, chooser, values, rest, own, known, path)
    elif rest:
        raise unknown(path + next(iter(rest)), known)
    return cls(**values)


def read_options(
    function: Callable[..., Any], given: Mapping[str, Any], path: str, hidden: Iterable[str] = ()
) -> Table:
    """The options of a function, checked against its signature and completed with its defaults."""
    allowed = parameters(function, hidden)
    for key in given:
        if key not in allowed:
            raise unknown(path + key, [path + name for name in allowed])
    return _obeying(function, _complete(allowed, given, path), path)


def keys(cls: Any, table: Mapping[str, Any], own: Own, path: str = "") -> list[str]:
    """Every dotted key that a recipe with these choices may have."""
    found: list[str] = []
    hints = types_of(cls)
    plain, chooser = _fields(cls)
    for item in plain:
        if is_dataclass(hints[item.name]):
            section = table.get(item.name, {})
            found += keys(hints[item.name], section if isinstance(section, Mapping) else {}, own, f"{path}{item.name}.")
        else:
            found.append(path + item.name)
    if chooser is not None:
        by = chooser.metadata["by"]
        chosen = _chosen(chooser, table.get(by, _default(cls, chooser)), own, path + by)
        found += [path + name for name in parameters(chosen, chooser.metadata["hidden"])] if chosen else []
    return found


def write(section: Any) -> Table:
    """The table that describes a dataclass; values that are None cannot be written in TOML and are left out."""
    table: Table = {}
    for item in fields(section):
        value = getattr(section, item.name)
        if item.name == "options" and item.metadata:
            table |= _plain(value)
        elif is_dataclass(value):
            table[item.name] = write(value)
        else:
            table[item.name] = _plain(value)
    return table


def drop_stale(cls: Any, table: Table, parts: Sequence[str], old: Any, own: Own) -> None:
    """After the choice at ``parts`` changed from ``old``, forgets the options that the new choice does not have."""
    for name in parts[:-1]:
        hint = types_of(cls).get(name)
        if not is_dataclass(hint):
            return
        cls, table = hint, table[name]
    plain, chooser = _fields(cls)
    if chooser is None or chooser.metadata["by"] != parts[-1] or table[parts[-1]] == old:
        return
    chosen = _chosen(chooser, table[parts[-1]], own, ".".join(parts))
    kept = {item.name for item in plain} | set(parameters(chosen) if chosen else ())
    if chosen and takes_any_key(chosen):
        former = _chosen(chooser, old, own, ".".join(parts))
        kept |= table.keys() - set(parameters(former) if former else ())
    for key in [key for key in table if key not in kept]:
        del table[key]


def check(value: Any, hint: Any, key: str) -> Any:
    """The value as its type wants it (a whole number will do for a number), or one sentence."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return check(value, next(a for a in arguments if a is not type(None)), key)
    if origin is Annotated:
        value = check(value, arguments[0], key)
        check_range(value, hint, f"'{key}'")
        return value
    if origin is Literal:
        return one_of(value, arguments, key)
    if hint in _SCALARS:
        return _scalar(value, hint, key)
    if origin in (dict, Mapping) or hint is dict:
        return _mapping(value, arguments, key)
    if hint is Any:
        return value
    if not isinstance(value, list | tuple):
        raise InputError(f"'{key}' takes a list, not {shown(value)}.")
    if origin is tuple and Ellipsis not in arguments and len(value) != len(arguments):
        raise InputError(f"'{key}' takes {len(arguments)} values, not {len(value)}.")
    return [check(item, arguments[0], key) for item in value]


def shown(value: Any) -> str:
    """A value in a sentence, not longer than a reader wants it."""
    return shortened(repr(value))


TAKE_CODE = ("algorithm", "data.source", "evaluate.metrics", "model.criterion", "model.name")
"""Keys whose values may be in a file of the user's own."""


def one_of(value: Any, choices: Iterable[Any], key: str) -> Any:
    """The value if it is one of the choices; else the nearest one is named."""
    allowed = list(choices)
    if value not in allowed:
        if key in TAKE_CODE and str(value).endswith(".py"):
            raise InputError(f"'{key}' names what is in a file, as in '{shortened(str(value))}:name', not the file.")
        raise InputError(f"'{key}' cannot be {shown(value)}; {suggestion(str(value), [str(a) for a in allowed])}")
    return value


def unknown(key: str, known: Sequence[str]) -> InputError:
    """The refusal of a key that nobody knows."""
    if not known:
        return InputError(f"There is no setting '{shortened(key)}'; nothing can be set there.")
    return InputError(f"There is no setting '{shortened(key)}'; did you mean '{nearest(key, known)}'?")


def suggestion(word: str, choices: Sequence[str]) -> str:
    """'did you mean …' where there are many choices, all of them where there are few."""
    if len(choices) <= 4:
        return f"choose from {', '.join(choices)}."
    return f"did you mean '{nearest(word, choices)}' (all: {', '.join(choices)})?"


def nearest(word: str, choices: Sequence[str]) -> str:
    """The most similar of the choices, or of their sections if the word may be one; a key with this last word, or that
    the last word abbreviates ('lr'), is more similar than any other."""
    section, dot, last = word[:200].rpartition(".")
    sections = [] if dot else [choice.partition(".")[0] for choice in choices if "." in choice]
    for choice in choices:
        end = choice.rpartition(".")[2]
        if choice.startswith(section + dot) and last in (end, _initials(end)):
            return choice
    return difflib.get_close_matches(word[:200], [*choices, *dict.fromkeys(sections)], n=1, cutoff=0.0)[0]


def _initials(name: str) -> str:
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


def shortened(text: str, most: int = 60) -> str:
    """The text, or its beginning and end where it is long."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


def _fields(cls: Any) -> tuple[list[Field[Any]], Field[Any] | None]:
    plain = [item for item in fields(cls) if not (item.name == "options" and item.metadata)]
    chooser = next((item for item in fields(cls) if item.name == "options" and item.metadata), None)
    return plain, chooser


def _default(cls: Any, chooser: Field[Any]) -> Any:
    return next(item.default for item in fields(cls) if item.name == chooser.metadata["by"])


def _chosen(chooser: Field[Any], name: Any, own: Own, key: str) -> Callable[..., Any] | None:
    """The function of that name, if it is the name of one."""
    if chooser.metadata["or_own"] and is_own(name):
        return own(name, key)
    choices: Mapping[str, Callable[..., Any]] = chooser.metadata["choices"]()
    return choices.get(name) if isinstance(name, str) else None


def _read_options(
    cls: Any, chooser: Field[Any], values: Table, rest: Table, own: Own, known: Sequence[str], path: str
) -> Table:
    by = chooser.metadata["by"]
    name = values.get(by, _default(cls, chooser))
    function = _chosen(chooser, name, own, path + by)
    if function is None:
        choices = chooser.metadata["choices"]()
        function = choices[one_of(name, choices, path + by)]
    allowed = parameters(function, chooser.metadata["hidden"])
    further = {key: value for key, value in rest.items() if key not in allowed}
    if further and not takes_any_key(function):
        raise unknown(path + next(iter(further)), known)
    return _obeying(function, _complete(allowed, rest, path, chooser.metadata["left_open"]), path) | further


def _obeying(function: Callable[..., Any], options: Table, path: str) -> Table:
    """The options, if the function takes them together."""
    for rule in rules_of(function):
        try:
            rule.check(options)
        except InputError as error:
            raise InputError(f"In [{path.rstrip('.')}]: {error}") from error
    return options


def _complete(
    allowed: Mapping[str, Parameter], given: Mapping[str, Any], path: str, left_open: Iterable[str] = ()
) -> Table:
    values = {}
    for name, option in allowed.items():
        if name in given:
            values[name] = check(given[name], option.hint, path + name)
        elif not option.required and name not in left_open:  # in the form in which TOML would give it
            values[name] = None if option.default is None else check(option.default, option.hint, path + name)
    return values


def _scalar(value: Any, hint: Any, key: str) -> Any:
    right = isinstance(value, int | float) if hint is float else isinstance(value, hint)
    if not right or (isinstance(value, bool) and hint is not bool):
        raise InputError(f"'{key}' takes {_SCALARS[hint]}, not {shown(value)}.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError(f"'{key}' takes {_SCALARS[hint]} of at most 64 bits, not {shown(value)}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"'{key}' takes {_SCALARS[hint]} that is finite, not {value}.")
    if isinstance(value, str) and not _is_unicode(value):
        raise InputError(f"'{key}' takes a text in Unicode, not {value!r}.")
    return hint(value)


def _is_unicode(text: str) -> bool:
    """Whether the text can be written down: bytes of a command line that are no UTF-8 cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _mapping(value: Any, arguments: Sequence[Any], key: str) -> Table:
    if not isinstance(value, Mapping):
        raise InputError(f"'{key}' takes a table of settings, not {shown(value)}.")
    inner = arguments[1] if arguments else Any
    return {name: check(item, inner, f"{key}.{name}") for name, item in value.items()}


def _expressible(hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return (
            len(arguments) == 2
            and type(None) in arguments
            and all(a is type(None) or _expressible(a) for a in arguments)
        )
    if origin is Literal:
        return True
    if origin is Annotated:
        return _expressible(arguments[0])
    if origin in (dict, Mapping):
        return arguments[0] is str
    return (
        hint is Any
        or hint in _SCALARS
        or (inspect.isclass(origin) and issubclass(origin, Sequence) and _bare(arguments[0]) in _SCALARS)
    )


def _bare(hint: Any) -> Any:
    """The type without the range that it is said with."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
