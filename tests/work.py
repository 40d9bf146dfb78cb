"""How much work a piece of code does, counted instead of timed."""

from __future__ import annotations

import sys
import tracemalloc
from types import FrameType, TracebackType
from typing import Any


class Work:
    """While active: how often functions are called, and the most bytes that Python and NumPy took beyond the start."""

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0

    def start(self) -> None:
        """Counts from here on."""
        tracemalloc.start()
        self._before = tracemalloc.get_traced_memory()[0]
        sys.setprofile(self._count)

    def stop(self) -> None:
        """Counts no more."""
        sys.setprofile(None)
        self.bytes = tracemalloc.get_traced_memory()[1] - self._before
        tracemalloc.stop()

    def __enter__(self) -> Work:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")
