"""What a function takes: its parameters with their types and defaults.

A function whose module needs PyTorch is a :class:`mixfed.deferred.Deferred`. Its parameters are read from the text of
its module, so that a recipe can be checked before PyTorch is loaded; the function's own signature stays the only
description of its settings. A name in an annotation is looked up in the text as well: the module defines it, or imports
it from another module of this package or from Python's own ``typing``. So are the rules of
:func:`mixfed.ranges.within_ranges` above it.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, get_type_hints

from mixfed.deferred import Deferred
from mixfed.errors import InputError
from mixfed.ranges import Rule

_IN_EARNEST = ("collections.abc", "typing", "mixfed.ranges", "mixfed.algorithms.registry")
"""Modules that do without PyTorch, from which an annotation's names are imported."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function; a ``hint`` of None is a type that cannot be known without PyTorch."""

    hint: Any
    default: Any = MISSING

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is MISSING


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of a function or of a class, in their order.

    One without a type, as users write it, has the type of its default, or takes any value.
    """
    function = inspect.unwrap(function)
    if isinstance(function, Deferred):
        return _read(function.module, function.name)
    try:
        hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    except NameError as error:
        told = getattr(function, "__qualname__", function)
        raise InputError(f"The types of the parameters of {told} cannot be understood: {error}.") from error
    found = {}
    for name, given in inspect.signature(function).parameters.items():
        if given.kind not in (given.VAR_POSITIONAL, given.VAR_KEYWORD):
            default = MISSING if given.default is given.empty else given.default
            of_default = type(default) if isinstance(default, bool | int | float | str) else Any
            found[name] = Parameter(hints.get(name, of_default), default)
    return found


def takes_any_key(function: Callable[..., Any]) -> bool:
    """Whether a function takes further keyword arguments of any name."""
    function = inspect.unwrap(function)
    if isinstance(function, Deferred):
        return False
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def rules_of(function: Callable[..., Any]) -> Sequence[Rule]:
    """What the parameters of a function must be for each other."""
    plain = inspect.unwrap(function)
    if isinstance(plain, Deferred):
        return _rules(plain.module, plain.name)
    found: Sequence[Rule] = getattr(function, "__rules__", ())
    return found


@cache
def _rules(module: str, name: str) -> Sequence[Rule]:
    text = _text(module)
    found = [d for d in text.definitions[name].decorator_list if isinstance(d, ast.Call)]
    return [text.value(rule) for call in found if ast.unparse(call.func) == "within_ranges" for rule in call.args]


@cache
def _read(module: str, name: str) -> dict[str, Parameter]:
    text = _text(module)
    definition = text.definitions[name]
    if isinstance(definition, ast.ClassDef):
        (definition,) = [f for f in definition.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
    given = definition.args
    places = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(places) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    found = {}
    for argument, default in zip([*places, *given.kwonlyargs], defaults, strict=True):
        if argument.annotation is not None:
            hint = text.type_of(argument.annotation)
            found[argument.arg] = Parameter(hint, text.value(default) if default and hint else MISSING)
    return found


class _Unknown(Exception):
    """A name that is not for recipes."""


class _Text:
    """A module that is not imported."""

    def __init__(self, module: str) -> None:
        loader: Any = getattr(find_spec(module), "loader", None)
        self.definitions: dict[str, ast.FunctionDef | ast.ClassDef] = {}
        self._assigned: dict[str, ast.expr] = {}
        self._imported: dict[str, tuple[str, str]] = {}
        for statement in _statements(ast.parse(loader.get_source(module))):
            match statement:
                case ast.FunctionDef() | ast.ClassDef():
                    self.definitions[statement.name] = statement
                case ast.Assign(targets=[ast.Name(name)]):
                    self._assigned[name] = statement.value
                case ast.ImportFrom(module=str(source)):
                    self._imported |= {a.asname or a.name: (source, a.name) for a in statement.names}

    def type_of(self, annotation: ast.expr) -> Any:
        """The type, or None where it is made of what only PyTorch knows."""
        try:
            return self.value(annotation)
        except _Unknown:
            return None

    def value(self, expression: ast.expr) -> Any:
        """What the expression comes to."""
        nodes = [*ast.walk(expression)]
        names = {node.id for node in nodes if isinstance(node, ast.Name)} - {
            node.arg for node in nodes if isinstance(node, ast.arg)
        }
        known = {name: self.lookup(name) for name in names}
        return eval(compile(ast.Expression(expression), "<a signature>", "eval"), known)

    def lookup(self, name: str) -> Any:
        """What a name of the module stands for."""
        if name in self._assigned:
            return self.value(self._assigned[name])
        if name in self._imported:
            source, original = self._imported[name]
            if source in _IN_EARNEST:
                return getattr(import_module(source), original)
            if source.startswith("mixfed."):
                return _text(source).lookup(original)
        elif name not in self.definitions and hasattr(builtins, name):
            return getattr(builtins, name)
        raise _Unknown(name)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, those under ``if TYPE_CHECKING`` too."""
    for statement in tree.body:
        yield from statement.body if isinstance(statement, ast.If) else [statement]


_text = cache(_Text)
