"""``torchrun … -m mixfed run``: rank 0 does what the command does in one process, and the others train with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from mixfed.backends.distributed.launch import started_by_torchrun
from mixfed.backends.distributed.ranks import LostRank, Ranks, join_ranks
from mixfed.cli.common import Interrupts
from mixfed.cli.console import be_quiet
from mixfed.experiments.build import build
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.running import run_beside


@dataclass(frozen=True)
class Task:
    """What rank 0 tells the others to train, and where the checkpoints are."""

    recipe: Recipe
    checkpoints: Path
    resume: bool


@contextmanager
def together(timeout: float) -> Iterator[Ranks | None]:
    """The ranks that ``torchrun`` started, of which rank 0 alone prints; None where this process is alone.

    That a rank is lost is told by the first one that notices.
    """
    if not started_by_torchrun():
        yield None
        return
    with join_ranks(timeout) as ranks:
        be_quiet(not ranks.leads)
        try:
            yield ranks
        except LostRank:
            be_quiet(not ranks.is_first_to_tell())
            raise


def agreed(ranks: Ranks | None) -> AbstractContextManager[None]:
    """What all ranks do or none (:meth:`mixfed.backends.distributed.ranks.Ranks.agreed`)."""
    return ranks.agreed() if ranks else nullcontext()


def tell(ranks: Ranks | None, task: Task | None) -> None:
    """Tells the other ranks what there is to do."""
    if ranks:
        ranks.of(0, task)


def follow(ranks: Ranks) -> None:
    """What the other ranks do, step by step with :func:`mixfed.cli.run.execute` on rank 0."""
    with ranks.agreed():
        """Rank 0 opens the run's folder."""
    task: Task | None = ranks.of(0, None)
    if task is None:
        return
    with ranks.agreed():
        experiment = build(task.recipe)
    with Interrupts() as interrupts, ranks.agreed():
        result = run_beside(experiment, task.checkpoints, ranks, resume=task.resume, should_stop=interrupts.asked)
    if not result.finished:
        raise interrupts.exit()
