"""What the commands share: settings from options, errors as sentences, signals, the progress bar."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mixfed.core.loop import Record
from mixfed.errors import InputError, RunStopped
from mixfed.experiments import toml
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.schema import Table

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


def sentence(text: object) -> None:
    """One sentence for the user, on standard error, in one piece however narrow the terminal."""
    words = " ".join(str(text).split())
    if words.partition(" ")[0].isalpha():  # not a path or the name of a setting
        words = words[0].upper() + words[1:]
    stderr.print(
        words if words.endswith((".", "?", "!")) else words + ".", style="bold red", markup=False, soft_wrap=True
    )


@contextmanager
def reported() -> Iterator[None]:
    """Errors that are the user's to mend become one sentence and an exit code."""
    try:
        yield
    except InputError as error:
        sentence(error)
        raise typer.Exit(2) from None
    except RunStopped as error:
        sentence(error)
        raise typer.Exit(1) from None
    except OSError as error:
        sentence(f"Cannot use {error.filename or 'a file'}: {error.strerror or error}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        sentence("Interrupted")
        raise typer.Exit(130) from None


class Given:
    """A recipe and the settings given with it on the command line."""

    def __init__(
        self,
        recipe: str,
        settings: list[str],
        *,
        data: Path | None = None,
        tuned: Path | None = None,
        **options: Any,
    ) -> None:
        self.recipe = recipe
        self.settings = settings
        self.tuned = tuned
        self.options = {_KEYS.get(key, key): value for key, value in options.items() if value is not None}
        if data is not None:
            self.options["data.folder"] = str(data.resolve())

    def base(self) -> Table:
        """The recipe as it was written."""
        return toml.load(self.recipe)

    def with_settings(self, settings: list[str]) -> Given:
        """The same with more settings, which those of the command line may overrule."""
        more = copy(self)
        more.settings = settings + self.settings
        return more

    def on(self, table: Table, **more: Any) -> Recipe:
        """The complete recipe: a table with the settings, then the options, then ``more`` applied.

        They come after what the table, and a file of tuned settings over it, says for the algorithm that they choose.
        """
        if self.tuned is not None:
            table = toml.with_tuned(table, self.tuned)
        algorithm = self._set(table, more).get("algorithm", Recipe.algorithm)
        return toml.resolve(self._set(toml.chosen(table, algorithm), more))

    def _set(self, table: Table, more: Table) -> Table:
        table = toml.override(table, self.settings)
        for key, value in (self.options | more).items():
            toml.set_key(table, key.split("."), value)
        return table


_KEYS = {"executor": "simulator.executor"}


def words(text: str, option: str) -> list[str]:
    """Different names from text with commas between."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found or len(set(found)) < len(found):
        raise InputError(f"{option} takes one or more different names with commas between, not '{text}'.")
    return found


class Interrupts:
    """While active, Ctrl-C and SIGTERM are requests to stop after the round; a second one stops at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each, handler in self._former.items():
            signal.signal(each, handler)
        stderr.print("Finishing this round, then saving (once more to stop at once) …", style="yellow")

    def asked(self) -> bool:
        """Whether somebody wants the run to stop."""
        return self.received is not None

    def exit(self) -> typer.Exit:
        """The exit of a run that a signal stopped: 128 + the signal's number, as shells count."""
        return typer.Exit(128 + (self.received or signal.SIGINT))


@contextmanager
def progress() -> Iterator[Progress]:
    """A live bar on standard error; it leaves no trace where an error is to be read."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, TimeRemainingColumn(), console=stderr) as bar:
        try:
            yield bar
        except (InputError, RunStopped, OSError):
            bar.live.transient = True
            raise


def shown_on(bar: Progress, task: Any) -> Callable[[Record], None]:
    """A callback that moves the bar and shows the latest metrics beside it."""

    def show(record: Record) -> None:
        bar.update(task, completed=record.round)
        if record.metrics:
            bar.update(task, told=told_metrics(record.metrics))

    return show


def told_metrics(metrics: Mapping[str, float], most: int = 2) -> str:
    """The first metrics as short text."""
    return "  ".join(f"{name} {value:.3f}" for name, value in list(metrics.items())[:most])
