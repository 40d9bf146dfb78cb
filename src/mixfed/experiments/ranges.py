"""Numbers of a recipe that no run could be made of are refused when it is completed, before PyTorch is loaded.

What depends on the data, or on the algorithm, is refused by those who know them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mixfed.core.ranges import check_batching, check_clip, check_optimizer
from mixfed.errors import InputError
from mixfed.experiments.recipe import Recipe, Rule, Training

Range = tuple[str, Callable[[Any], bool]]

COUNT: Range = ("at least 1", lambda x: x >= 1)
NOT_NEGATIVE: Range = ("at least 0", lambda x: x >= 0)
POSITIVE: Range = ("a number above 0", lambda x: x > 0)
SHARE: Range = ("a share from 0 to 1", lambda x: 0 <= x <= 1)
PART: Range = ("a share of at least 0 and below 1", lambda x: 0 <= x < 1)

RANGES: Mapping[str, Range] = {
    **dict.fromkeys(["rounds", "cohort", "evaluate.every", "evaluate.best_of_last", "checkpoint.every"], COUNT),
    **dict.fromkeys(["stop.patience", "simulator.memory", "auxiliary.steps"], COUNT),
    **dict.fromkeys(["stop.minutes", "stop.bytes", "client.bound", "mixing.w_f", "mixing.w_c"], NOT_NEGATIVE),
    **dict.fromkeys(["schedule.buffer", "schedule.concurrency", "schedule.patience", "simulator.cores"], NOT_NEGATIVE),
    **dict.fromkeys(["auxiliary.pretrain", "data.central.examples", "data.joining.round"], NOT_NEGATIVE),
    "simulator.threads": ("at least 1, or 0 to have them chosen", lambda x: x >= 0),
    "simulator.chunk": ("at least 1, or 0 to have it chosen", lambda x: x >= 0),
    "simulator.timeout": POSITIVE,
    **dict.fromkeys([f"federation.{name}" for name in ("deadline", "ttl", "assemble", "poll")], POSITIVE),
    **dict.fromkeys(
        ["data.label_noise", "data.joining.fraction", "data.central.inside", "data.central.outside"], SHARE
    ),
    **dict.fromkeys([f"data.{name}" for name in ("held_out", "test_share", "validation")], PART),
    **dict.fromkeys(["data.own_test", "data.own_validation", "data.central.validation"], PART),
}
"""The keys whose numbers have a range of their own, whatever else the recipe says."""


def check_ranges(recipe: Recipe) -> None:
    """Refuses a number that is out of its range, with one sentence that names its key."""
    for key, (wanted, holds) in RANGES.items():
        value: Any = recipe
        for name in key.split("."):
            value = getattr(value, name)
        if not holds(value):
            raise InputError(f"'{key}' must be {wanted}, not {value:g}.")
    if recipe.mixing.w_f == recipe.mixing.w_c == 0:
        raise InputError("The weights mixing.w_f and mixing.w_c of the mixed loss cannot both be 0.")
    for name, section in {"client": recipe.client, "central": recipe.central}.items():
        with _said_of(name):
            check_batching(section.batch_size, section.steps or None, section.epochs or None)
            check_clip(section.clip or None)
    rules: dict[str, Rule | Training] = {
        "client": recipe.client,
        "central": recipe.central,
        "server": recipe.server,
        "merge": recipe.merge,
    }
    for name, rule in rules.items():
        with _said_of(name):
            check_optimizer(rule.learning_rate, **rule.options)


@contextmanager
def _said_of(section: str) -> Iterator[None]:
    """Names the section in what is refused there."""
    try:
        yield
    except InputError as error:
        raise InputError(f"In [{section}]: {error}") from error
