"""The simulator over many ranks, and what else of a run is done together: evaluation, checkpoints, stopping."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mixfed.backends.distributed.ranks import Ranks
from mixfed.backends.distributed.shares import Deal, longest_first
from mixfed.backends.distributed.team import RankTeam
from mixfed.backends.simulator.engine import Simulator
from mixfed.core import tree
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.loop import Callback, Evaluate, Record
from mixfed.core.tree import Params
from mixfed.errors import RunStopped


class Distributed(Simulator):
    """Simulates clients on several ranks (:func:`mixfed.backends.distributed.ranks.join_ranks`).

    All ranks follow the same state by the same pure functions. Each simulates a share of every cohort, which ``deal``
    assigns; other ``options`` are those of the simulator. Rank 0 writes checkpoints and calls callbacks.
    """

    def __init__(self, ranks: Ranks, executor: str = "auto", *, deal: Deal = longest_first, **options: Any) -> None:
        super().__init__(executor, team=RankTeam(ranks, deal), **options)
        self.ranks = ranks


@dataclass(frozen=True)
class Together:
    """The parts of a run around the rounds, as each rank has them."""

    evaluate: Evaluate | None
    callbacks: Sequence[Callback]
    checkpoints: Checkpoints | None
    should_stop: Callable[[], bool]

    def on(self, ranks: Ranks) -> Together:
        """All ranks know rank 0's metrics and stop in the same round; rank 0 alone writes and tells."""

        def evaluate(params: Params, privates: Any) -> Mapping[str, float]:
            assert self.evaluate is not None
            return ranks.of(0, dict(self.evaluate(params, privates)))

        stops = False

        def tell(record: Record) -> str | None:
            """One letter has both: what rank 0's callbacks say, and whether a rank wants to stop."""
            nonlocal stops
            ends = [callback(record) for callback in self.callbacks] if ranks.leads else []
            letters = ranks.gather((" ".join(filter(None, ends)), self.should_stop()))
            stops = any(stop for _, stop in letters)
            return letters[0][0]

        return Together(
            evaluate if self.evaluate else None,
            [tell],
            RankCheckpoints(self.checkpoints, ranks) if self.checkpoints else None,
            lambda: stops,
        )


class RankCheckpoints(Checkpoints):
    """Checkpoints that rank 0 writes and reads, and that all ranks take up; they may have been other ranks before."""

    def __init__(self, of_first: Checkpoints, ranks: Ranks) -> None:
        self.folder, self.every = of_first.folder, of_first.every
        self._of_first, self._ranks = of_first, ranks

    def save(self, contents: Mapping[str, Any]) -> None:
        """Rank 0 writes, if all ranks have the same state."""
        marks = self._ranks.gather(_mark(contents["state"]))
        if len(set(marks)) > 1:
            other = next(rank for rank, mark in enumerate(marks) if mark != marks[0])
            raise RunStopped(
                f"Ranks 0 and {other} no longer have the same state in round {contents['round']}; run them on machines"
                " of one kind, with the same versions."
            )
        if self._ranks.leads:
            self._of_first.save(contents)

    def resume(self, *, seed: int, rounds: int, every: int) -> dict[str, Any] | None:
        """What rank 0 reads."""
        leads = self._ranks.leads
        return self._ranks.of(0, self._of_first.resume(seed=seed, rounds=rounds, every=every) if leads else None)


def _mark(state: Mapping[str, Any]) -> bytes:
    """A fingerprint of all tensors of a state."""
    found = hashlib.blake2b(digest_size=16)
    for x in tree.leaves(state):
        found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
