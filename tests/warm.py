"""Processes of their own that need not load PyTorch again: they are forked from a server that has loaded it once.

The server (``multiprocessing``'s own) has loaded the package and has computed nothing, so a process that is forked from
it is as good as a fresh one: it can be stopped by any signal, and it dies alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.preloaded"])
_computes = True


class Process:
    """A function at work in a process of its own, and what it writes to standard output and standard error."""

    def __init__(self, function: Callable[..., object], *arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mixfed-told-")
        context: Any = _server if _computes else multiprocessing.get_context("fork")
        self._process = context.Process(target=_run, args=(self._folder.name, function, arguments))
        with contextlib.chdir(ROOT):  # where the server finds the tests
            self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it, or None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """The same, as ``subprocess`` calls it."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, if the process still runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int | None:
        """Waits for the end, and returns None where it does not come in time."""
        self._process.join(timeout)
        return self.returncode

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """Waits for the end, which must come in time, and returns both outputs."""
        if self.wait(timeout) is None:
            self.send_signal(signal.SIGKILL)
            self._process.join()
            raise AssertionError(f"still at work after {timeout} seconds: {self.told()}")
        return self.told()

    def told(self) -> tuple[str, str]:
        """Both outputs so far."""
        out, err = (Path(self._folder.name) / name for name in ("out", "err"))
        return _text(out), _text(err)


def computes_nothing() -> None:
    """Says that this process only starts others, so that they may be forked from itself."""
    global _computes
    _computes = False


def _text(file: Path) -> str:
    return file.read_text("utf-8", "replace") if file.exists() else ""


def _run(folder: str, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    computes_nothing()  # so far
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream.fileno())
        os.close(file)
    function(*arguments)


def command(
    arguments: list[str], environment: dict[str, str], folder: Path | None, before: Callable[[], object]
) -> None:
    """The command ``mixfed`` as a process of its own sees it; ends with the command's exit code."""
    os.environ |= environment
    if folder:
        os.chdir(folder)
    before()
    from mixfed.cli import app

    sys.argv = ["mixfed", *arguments]
    app()
