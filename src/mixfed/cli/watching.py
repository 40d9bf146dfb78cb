"""Following several runs from the terminal: a bar for each, and signals that stop them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mixfed.cli.common import Interrupts, progress, report_faults, say_how_to_go_on
from mixfed.experiments.report.bars import begun_on
from mixfed.experiments.watch import Interrupted, Watch


@contextmanager
def watching() -> Iterator[Watch]:
    """What several runs report to; an interrupt ends the command with the way to go on."""
    with Interrupts() as interrupts, progress() as bar:
        try:
            yield Watch(partial(begun_on, bar), report_faults, interrupts.asked)
        except Interrupted as stop:
            bar.stop()
            say_how_to_go_on(str(stop))
            raise interrupts.exit() from None
