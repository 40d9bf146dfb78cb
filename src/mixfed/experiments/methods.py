"""Algorithms by the names that recipes use: packaged ones, and the user's own, which a recipe's ``methods`` places."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature, unwrap
from typing import TYPE_CHECKING, Any

from mixfed.algorithms.registry import ALGORITHMS, Entry
from mixfed.deferred import Deferred
from mixfed.errors import InputError, explained
from mixfed.experiments import own
from mixfed.experiments.schema import Table, check, is_own, read_options, suggestion

if TYPE_CHECKING:
    from mixfed.algorithms.makers import Setup
    from mixfed.core.algorithm import Algorithm


def with_methods(table: Table, algorithms: Sequence[str]) -> tuple[Table, list[str]]:
    """The table with all algorithms of the user's own among these in its ``methods``, and their short names."""
    methods: Table = {**check(table.get("methods", {}), dict[str, str], "methods")}
    for name in filter(is_own, algorithms):
        if methods.setdefault(own.short(name), name) != name:
            raise InputError(f"There are two algorithms '{own.short(name)}', {methods[own.short(name)]} and {name}.")
    return table | {"methods": methods} if methods else table, [own.short(name) for name in algorithms]


def find_algorithm(name: str, table: Table) -> Entry:
    """The algorithm of that name in a recipe's table, or a sentence with the nearest name."""
    methods = table.get("methods", {})
    if name in methods and name in ALGORITHMS:
        raise InputError(f"There is a packaged algorithm '{name}'; give your own one in {methods[name]} another name.")
    if name in methods:
        return _own_algorithm(methods[name], table.get("home", ""))
    if name.endswith(".py"):
        raise InputError(f"'algorithm' names what is in a file, as in '{name}:name', not the file.")
    if name not in ALGORITHMS:
        raise InputError(f"There is no algorithm '{name}'; {suggestion(name, [*ALGORITHMS, *methods])}")
    return ALGORITHMS[name]


def algorithm_options(entry: Entry, given: Table, path: str) -> Table:
    """The settings of an algorithm; what it is made of, its first parameter, is none."""
    make = unwrap(entry.make)
    hidden = [] if isinstance(make, Deferred) else [*signature(make).parameters][:1]
    return read_options(make, given, path, hidden)


def _own_algorithm(name: str, home: str) -> Entry:
    """A function of the clients' trainer, or of the whole ``setup`` if its first parameter has that name."""
    make = own.load_function(name, home, "algorithm")
    if not signature(make).parameters:
        raise InputError(f"The algorithm '{name}' needs a parameter for the clients' trainer, or one named 'setup'.")
    (first, *_) = signature(make).parameters

    def made(setup: Setup, **options: Any) -> Algorithm:
        from mixfed.core.algorithm import Algorithm

        with explained(f"The algorithm '{name}' cannot be built so"):
            found = make(setup if first == "setup" else setup.client, **options)
        if not isinstance(found, Algorithm):
            raise InputError(f"The algorithm '{name}' returned {found!r:.60}, not an Algorithm.")
        return found

    made.__wrapped__ = make  # type: ignore[attr-defined]  # so that its options can be listed
    return Entry((make.__doc__ or "").strip().partition("\n")[0], made)
