"""What the commands share: errors as sentences, signals, the progress bar. PyTorch is not needed for it."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import Progress

from mixfed.backends.distributed.launch import ranks_here, started_by_torchrun
from mixfed.cli.console import notes, sentence, stderr
from mixfed.core import faults
from mixfed.errors import InputError, RunStopped
from mixfed.experiments import own
from mixfed.experiments.report.bars import bars
from mixfed.experiments.schema import shortened

if TYPE_CHECKING:
    from mixfed.core.loop import Result


@contextmanager
def reported() -> Iterator[None]:
    """Errors that are the user's to mend become one sentence and an exit code."""
    try:
        yield
    except InputError as error:
        _give_up(error, 2)
    except RunStopped as error:
        _give_up(error, 1)
    except OSError as error:
        _give_up(f"Cannot use {error.filename or 'a file'}: {error.strerror or error}", 2)
    except KeyboardInterrupt:
        _give_up("Interrupted", 130)
    except Exception as error:
        told = own.failure(error) or _of_this_machine(error)
        if told is None:
            raise
        _give_up(told, 2)


def _of_this_machine(error: Exception) -> str | None:
    """What a number or a size in the input asked too much of."""
    match error:
        case RecursionError():
            return "The input is nested too deeply to be read; a recipe has sections within sections, but few of them"
        case OverflowError():
            return f"A number is too large to compute with ({error}); look for a setting with many digits"
        case MemoryError() | RuntimeError() if _is_for_want_of_memory(error):
            return f"There is not enough memory ({_first_line(error)}); make the model, the batches or the steps less"
    return None


def _give_up(text: object, code: int) -> None:
    sentence(text)
    raise typer.Exit(code) from None


def _is_for_want_of_memory(error: Exception) -> bool:
    """Whether NumPy, Python or PyTorch (which has no error of its own for it on the CPU) could not get memory."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in ("allocate memory", "out of memory"))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["it was asked for more than there is"])[0].rstrip(".")


def words(text: str, option: str) -> list[str]:
    """Different names from text with commas between."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found or len(set(found)) < len(found):
        raise InputError(f"{option} takes one or more different names with commas between, not '{text}'.")
    return found


def numbers_of(seeds: str) -> list[int]:
    """Different seeds from text with commas between."""
    found = [_seed(word) for word in words(seeds, "--seeds")]
    if len(set(found)) < len(found):
        raise InputError(f"--seeds takes different numbers with commas between, and '{seeds}' has one of them twice.")
    return found


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"A seed is a whole number, not '{shortened(text)}'.") from None


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
        """Where a rank was lost, torchrun sends the others SIGTERM, which must not cut off the sentence about it."""
        fails = kind is not None and started_by_torchrun()
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_IGN if fails and number == signal.SIGTERM else handler)

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


def progress() -> AbstractContextManager[Progress]:
    """Live bars on standard error."""
    return bars(notes)


def report_faults(result: Result) -> None:
    """Says which clients sent updates that were dropped or absurdly long, if any did."""
    for told in faults.told(result.faults):
        stderr.print(told, style="yellow", markup=False, soft_wrap=True)
    absurd = faults.worst(result.faults)
    if absurd is not None:
        bound = faults.suggested_bound(absurd)
        stderr.print(f"To drop updates as long as these set client.bound={bound:g}.", style="yellow", soft_wrap=True)


def say_that_it_begins(folder: Path, why: str) -> None:
    """What ``--resume`` does where there is nothing to go on with, so that one command can be repeated."""
    stderr.print(f"{folder} holds {why} there.", style="dim", soft_wrap=True)


def say_how_to_go_on(done: str) -> None:
    """The command that takes up an interrupted run."""
    words = ["mixfed", *sys.argv[1:]]
    by_itself = words[1:2] in (["study"], ["tune"], ["reproduce"])  # which take finished runs as they are
    if started_by_torchrun():
        words = ["torchrun", "--nproc-per-node", str(ranks_here()), "-m", *words]
    command = shlex.join(words if by_itself or "--resume" in words else [*words, "--resume"])
    stderr.print(f"Stopped after {done}; go on with: {command}", soft_wrap=True)
