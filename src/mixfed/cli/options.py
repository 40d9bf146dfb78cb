"""The options that commands share: each is written once, and a command names those that it takes.

:func:`asks_for` makes a command of a function whose first parameter is a ``request``: the command has the recipe,
``--set`` and the named options in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mixfed.errors import InputError
from mixfed.experiments.request import Request

RECIPE = Annotated[str, typer.Argument(metavar="RECIPE", help="A packaged recipe (see 'mixfed list') or a .toml.")]
SETTINGS = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the recipe; may be repeated.")
]


def folder(name: str) -> Path:
    """A folder by its name; an empty one would be taken for the folder that the command is given in."""
    if not name.strip():
        from mixfed.cli.common import reported

        with reported():
            raise InputError("--out and --data take the name of a folder, not an empty text.")
    return Path(name)


SHARED_DATA = typer.Option(
    "--data", help="Folder with the data files (or set MIXFED_DATA).", metavar="DIR", parser=folder
)
SHARED: dict[str, Any] = {
    "algorithm": Annotated[str | None, typer.Option(help="An algorithm (see 'mixfed list').")],
    "rounds": Annotated[int | None, typer.Option(help="Number of rounds.")],
    "seed": Annotated[int | None, typer.Option(help="Seed of every random draw.")],
    "data": Annotated[Path | None, SHARED_DATA],
    "device": Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps …")],
    "executor": Annotated[
        Literal["auto", "loop", "vmap", "factored"] | None,
        typer.Option(help="How clients are simulated; auto times the others."),
    ],
    "backend": Annotated[
        Literal["simulator", "loopback"] | None,
        typer.Option(help="Where clients run: simulated, or behind bytes as over a network (for debugging)."),
    ],
    "deterministic_sum": Annotated[
        bool | None,
        typer.Option("--deterministic-sum", help="Fix the order of additions, whatever the number of ranks."),
    ],
    "max_minutes": Annotated[float | None, typer.Option(help="End a run after so many minutes of training.")],
    "max_bytes": Annotated[int | None, typer.Option(help="End a run once so many bytes were sent.")],
    "tuned": Annotated[Path | None, typer.Option(help="Settings that 'mixfed tune' chose.", metavar="FILE")],
}
"""Options of a recipe by name."""


def asks_for(*names: str, recipe: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function of a request. Without ``recipe`` the function gets, in its place, what makes a
    request of the name of a recipe."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(*, settings: list[str] | None, **given: Any) -> None:
            from mixfed.cli.common import reported

            with reported():
                options = {name: given.pop(name) for name in names}

                def ask(name: str) -> Request:
                    return Request(name, settings or [], **options)

                function(ask(given.pop("recipe")) if recipe else ask, **given)

        common = [_option("settings", SETTINGS), *(_option(name, SHARED[name]) for name in names)]
        _, *own = signature(function, eval_str=True).parameters.values()
        named = [Parameter("recipe", Parameter.KEYWORD_ONLY, annotation=RECIPE)] if recipe else []
        keywords = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own]
        command.__signature__ = Signature([*named, *common, *keywords])  # type: ignore[attr-defined]
        return command

    return decorate


def _option(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=None)
