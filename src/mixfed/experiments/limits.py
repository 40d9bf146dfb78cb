"""Settings that ask for more memory than there is are refused before a run, with the size that they would need."""

from __future__ import annotations

import math

import numpy as np

from mixfed.data.scenario import Scenario
from mixfed.errors import require_memory
from mixfed.experiments.recipe import Recipe, Training

ROW = np.dtype(np.int64).itemsize
"""Bytes of the number of a row."""


def require_room_for_batches(recipe: Recipe, scenario: Scenario) -> None:
    """Refuses steps or epochs whose batches, as numbers of rows for a whole cohort, do not fit into memory."""
    cohort = max(recipe.schedule.concurrency, recipe.cohort, 1)
    sizes = scenario.clients.sizes()
    _check(recipe.client, "client", int(sizes.max(initial=0)), min(cohort, len(sizes)))
    if scenario.central is not None:
        _check(recipe.central, "central", len(scenario.central), 1)


def _check(section: Training, name: str, examples: int, trainers: int) -> None:
    batch = min(section.batch_size, examples) if section.batch_size > 0 else examples
    steps = section.steps or section.epochs * math.ceil(examples / max(batch, 1))
    key = "steps" if section.steps else "epochs"
    what = f"A round's list of examples with {name}.{key} = {section.steps or section.epochs}"
    require_memory(what, ROW * trainers * steps * batch, f"choose fewer {key}")
