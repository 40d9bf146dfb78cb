"""Progress bars, in a terminal and in a notebook."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mixfed.experiments.watch import Moved

if TYPE_CHECKING:
    from mixfed.core.loop import Record


@contextmanager
def bars(console: Console | None = None) -> Iterator[Progress]:
    """Live bars, by default where Python prints; they leave no trace where an error is to be read."""
    columns = (_text("{task.description}"), BarColumn(), MofNCompleteColumn(), _text("{task.fields[told]}"))
    with Progress(*columns, _text("{task.fields[warned]}"), TimeRemainingColumn(), console=console) as bar:
        try:
            with _warnings_above(bar):
                yield bar
        except Exception:
            bar.live.transient = True
            raise


@contextmanager
def _warnings_above(bar: Progress) -> Iterator[None]:
    """Shows what the library warns of above the bar, whose last line remembers that there was something."""
    log, handler = logging.getLogger("mixfed"), logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        warns = record.levelno >= logging.WARNING
        style = "yellow" if warns else "dim"
        bar.console.print(record.getMessage(), style=style, markup=False, highlight=False, soft_wrap=True)
        for task in bar.task_ids[-1:] if warns else ():
            bar.update(task, warned="warned")

    handler.emit = emit  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def begin(bar: Progress, title: str, rounds: int) -> Any:
    """A new line of the bar."""
    return bar.add_task(title, total=rounds, told="", warned="")


def begun_on(bar: Progress, title: str, rounds: int) -> Moved:
    """A new line of the bar; what is returned moves it and shows the latest metrics beside it."""
    return _moving(bar, begin(bar, title, rounds))


def shown_on(bar: Progress, task: Any) -> Callable[[Record], None]:
    """A callback of a run that moves the bar and shows the latest metrics beside it."""
    move = _moving(bar, task)
    return lambda record: move(record.round, record.metrics)


def told_metrics(metrics: Mapping[str, float], most: int = 2) -> str:
    """The first metrics as short text."""
    return "  ".join(f"{name} {value:.3f}" for name, value in list(metrics.items())[:most])


def _moving(bar: Progress, task: Any) -> Moved:
    def move(done: int, metrics: Mapping[str, float]) -> None:
        bar.update(task, completed=done)
        if metrics:
            bar.update(task, told=told_metrics(metrics))

    return move


def _text(pattern: str) -> TextColumn:
    return TextColumn(pattern, markup=False)
