"""How somebody follows several runs and stops them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mixfed.core.loop import Result

Moved = Callable[[int, Mapping[str, float]], None]
"""Is told how many rounds are done, and the metrics of the last one (none where it was not evaluated)."""


class Interrupted(Exception):
    """Somebody asked to stop; the text says what was done until then. The same call goes on from there."""


@dataclass(frozen=True)
class Watch:
    """How somebody follows several runs; every part may be left out.

    ``begin`` is told a title and the number of rounds of whatever begins, and returns what is told of its progress.
    ``ended`` sees the result of every run that was trained, and ``should_stop`` is asked after every round.
    """

    begin: Callable[[str, int], Moved] = lambda title, rounds: lambda done, metrics: None
    ended: Callable[[Result], None] = lambda result: None
    should_stop: Callable[[], bool] = lambda: False


UNWATCHED = Watch()
