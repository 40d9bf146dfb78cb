"""``--quiet`` and ``--verbose`` after the name of a command too, where people write them."""

from __future__ import annotations

from typing import Any

import click
from typer.core import TyperGroup, TyperOption

from mixfed.cli import console

QUIET = "Show results and errors only."
VERBOSE = "Also tell what is done on the way."


class Telling(TyperGroup):
    """Commands of which each takes the two options, but those that hand all options on to another program."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for command in self.commands.values():
            if not isinstance(command, click.Group) and not command.context_settings.get("ignore_unknown_options"):
                command.params += [_option("--quiet", QUIET), _option("--verbose", VERBOSE)]


def _option(name: str, told: str) -> TyperOption:
    return TyperOption(
        param_decls=[name],
        is_flag=True,
        default=False,
        help=told,
        expose_value=False,
        callback=_hear,
        show_default=False,
    )


def _hear(_: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted:
        quiet = option.name == "quiet" or console.notes.quiet
        console.tell_more_or_less(quiet=quiet, verbose=not quiet)
