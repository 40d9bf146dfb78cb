"""A broken run says so: what goes wrong while a run trains, told once each.

Nothing is computed in a round for it. What is looked at are metrics that were evaluated anyway and the faults of
clients' updates; and, at the start, half way and at the end, the model's answers to a few test examples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import gather
from mixfed.core.faults import Faults, told
from mixfed.core.model import Model
from mixfed.core.soundness import Found
from mixfed.core.tree import Params
from mixfed.data.store import CentralData
from mixfed.errors import RunStopped

SAMPLE = 512
"""So many test examples are asked about."""
EXPLODED = 10.0
"""A loss this many times as large as at the start has exploded."""
BETTER = 0.01
"""Progress is a loss that is smaller by this share of what it was, or a share of right answers larger by this."""

_log = logging.getLogger("mixfed")


@dataclass(frozen=True)
class Glance:
    """The mean loss of a model on some test examples, the share of right answers, and its one answer if it has only
    one (both None where answers are no classes)."""

    loss: float
    right: float | None
    only_answer: int | None


class Alarms:
    """The warnings of a run, a sentence of each kind. Each is logged when it first comes."""

    def __init__(self, algorithm: Algorithm, tests: Mapping[str, CentralData]) -> None:
        self.algorithm = algorithm
        common = algorithm.personal is None and tests  # else no model answers for all
        self._sample = _sample(next(iter(tests.values()))) if common else None
        self._start: Glance | None = None
        self._told: Found = {}
        self.broken = ""
        """Why the model is of no use, if it is so."""

    def sentences(self) -> list[str]:
        """All warnings so far."""
        return list(self._told.values())

    def tell(self, found: Found) -> None:
        """Logs warnings that are new, of kinds that were not told before."""
        for kind, sentence in found.items():
            if kind not in self._told:
                self._told[kind] = sentence
                _log.warning(sentence)

    def heard(self, faults: Faults) -> None:
        """Looks at the faults of clients' updates so far; what is told of a kind counts on."""
        for kind in dict.fromkeys(fault.kind for fault in faults.all()):
            (sentence,) = told([fault for fault in faults.all() if fault.kind == kind])
            self.tell({kind: sentence})
            self._told[kind] = sentence

    def evaluated(self, round: int, rounds: int, metrics: Mapping[str, float], params: Params) -> None:
        """Looks at a model that was evaluated after a round; one that is not finite stops the run."""
        require_finite(self.algorithm, params, round)
        self._look_at_loss(round, metrics)
        late = round == rounds or (2 * round >= rounds and "one answer" not in self._told)
        if self._sample and late and not self.broken:
            now = glance(self.algorithm.model, params, self._sample)
            self._look_at_answers(round, now)
            if round == rounds:
                self._look_for_progress(round, now)

    def tree(self) -> dict[str, Any]:
        """What was told, as a tree."""
        return {"told": [[kind, sentence] for kind, sentence in self._told.items()], "broken": self.broken}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes up what was told before a checkpoint."""
        self._told, self.broken = dict(saved["told"]), saved["broken"]

    def _at_start(self) -> Glance | None:
        if self._sample and self._start is None:
            self._start = glance(self.algorithm.model, self.algorithm.model.initial(), self._sample)
        return self._start

    def _look_at_loss(self, round: int, metrics: Mapping[str, float]) -> None:
        start, self.broken = self._at_start() if "loss" in metrics else None, ""
        for name, value in metrics.items():
            if name.startswith("loss") and not math.isfinite(value):
                self.broken = f"The {name} was not finite after round {round}; lower the learning rates."
        if start and math.isfinite(metrics["loss"]) and metrics["loss"] > EXPLODED * start.loss:
            self.broken = (
                f"The loss rose from {start.loss:.3g} at the start to {metrics['loss']:.3g} after round {round}; lower"
                " the learning rates or clip the gradients."
            )
        if self.broken:
            self.tell({"exploded": self.broken})

    def _look_at_answers(self, round: int, now: Glance) -> None:
        assert self._sample is not None
        labels = self._sample.arrays.get("y", np.zeros(0))
        if now.only_answer is not None and len(np.unique(labels)) > 1:
            answer = self.algorithm.model.meaning.name(now.only_answer)
            self.tell(
                {
                    "one answer": f"After round {round} the model gave the answer {answer} to all"
                    f" {len(labels)} test examples it was asked, of which {_share(labels, now.only_answer)} are such;"
                    " lower the learning rates, or look whether clients hold one class each."
                }
            )

    def _look_for_progress(self, round: int, now: Glance) -> None:
        start = self._at_start()
        assert start is not None
        smaller = now.loss < (1 - BETTER) * start.loss
        wiser = now.right is not None and start.right is not None and now.right > start.right + BETTER
        if not smaller and not wiser:
            worse = now.loss > (1 + BETTER) * start.loss
            self.tell(
                {
                    "no progress": f"After {round} rounds the model is {'worse' if worse else 'no better'} than at the"
                    f" start (loss {now.loss:.3g}, at the start {start.loss:.3g}); {'lower' if worse else 'raise'} the"
                    " learning rates, or look whether labels belong to their examples."
                }
            )


def require_finite(algorithm: Algorithm, params: Params, round: int) -> None:
    """Stops a run whose model has numbers that are not finite. Updates of clients that have such are dropped before
    they reach it, so that it is the server who made them."""
    if all(bool(x.isfinite().all()) for x in params.values() if x.is_floating_point()):
        return
    at_centre = bool(algorithm.centre.judged) or not algorithm.batching
    who = "The centre's training" if at_centre else "The server's step"
    raise RunStopped(
        f"{who} made numbers of the model that are not finite, in round {round} at the latest; lower the learning rate"
        f" {'at the centre' if at_centre else 'of the server'} or clip the gradients."
    )


def glance(model: Model, params: Params, sample: CentralData) -> Glance:
    """How a model answers a few examples."""
    batch = gather(sample, np.arange(len(sample)), model.device)
    weights = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in params.items()}
    with torch.no_grad():
        outputs = model.outputs(weights, batch, training=False)
        loss = float(model.losses(weights, batch, training=False).double().mean())
    labels = batch.get("y")
    if not isinstance(outputs, Tensor) or labels is None or labels.ndim != 1 or labels.is_floating_point():
        return Glance(loss, None, None)
    if outputs.ndim != 2:
        return Glance(loss, None, None)
    answers = outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()
    first = int(answers[0])
    only = first if bool((answers == first).all()) else None
    return Glance(loss, float((answers == labels).double().mean()), only)


def _sample(data: CentralData) -> CentralData:
    return data.select(np.unique(np.linspace(0, len(data) - 1, SAMPLE).astype(np.int64)))


def _share(labels: NDArray[Any], answer: int | None) -> str:
    return f"{float((labels == answer).mean()):.0%}"
