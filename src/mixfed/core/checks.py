"""Whether a run can work: found out before the first round, on all that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mixfed.core.algorithm import CENTRE, CLIENTS, Algorithm
from mixfed.core.compatible import check_compatible
from mixfed.core.schedule import Schedule
from mixfed.core.soundness import Data, Found, look_over
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError

Tests = Mapping[str, CentralData]


def by_name(given: Any, name: str) -> dict[str, Any]:
    """The clients or the central sources of a run by their names; a single one has the usual name."""
    if given is None:
        return {}
    found = dict(given) if isinstance(given, Mapping) else {name: given}
    wanted, made = (FederatedData, "from_datasets") if name == CLIENTS else (CentralData, "from_arrays")
    for data in found.values():
        if not isinstance(data, wanted):
            raise InputError(
                f"The data of the {name} is a mixfed.{wanted.__name__}, not a {type(data).__name__}; make one with"
                f" mixfed.{wanted.__name__}.{made}(…)."
            )
    return found


def check_settings(algorithm: Algorithm, schedule: Schedule, rounds: int, every: int) -> None:
    """Refuses numbers that cannot be meant."""
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            f"A run takes an algorithm, such as mixfed.fedavg(trainer), and not a {type(algorithm).__name__}."
        )
    if rounds < 1 or every < 1:
        raise InputError("The number of rounds and the evaluation interval must be at least 1.")
    if torch.is_inference_mode_enabled():
        raise InputError("Nothing can be trained inside torch.inference_mode(); call run outside of it.")
    joining = schedule.joining
    if joining and joining.round >= rounds:
        raise InputError(f"A device that joins after {joining.round} rounds never joins a run of {rounds}.")


def check_data(
    algorithm: Algorithm,
    populations: Mapping[str, FederatedData],
    central: Mapping[str, CentralData],
    tests: Tests,
    schedule: Schedule,
) -> Found:
    """Refuses examples that the run cannot use, and returns what is likely a mistake: a sentence for each kind."""
    tests = {"": tests[""]} if "" in tests else tests  # the others are parts of it
    clients: dict[str, Data] = {}
    judged: dict[str, Data] = {}
    for source in algorithm.batching:
        if source not in populations:
            raise InputError(f"The algorithm {algorithm.name} trains on clients '{source}', and the run has none.")
        populations[source].require_no_empty_clients()
        schedule.check(source, populations[source], algorithm.lateness.buffer)
        clients[f"the examples of '{source}'"] = populations[source]
    for source, data in central.items():
        if source in algorithm.centre.judged:
            judged["the central examples" if source == CENTRE else f"the central examples '{source}'"] = data
    asked: dict[str, Data] = {
        f"the test examples '{name}'" if name else "the test examples": data for name, data in tests.items()
    }
    for whose, examples in {**clients, **judged, **asked}.items():
        check_compatible(algorithm.model, examples, whose)
    unused: list[Data] = [d for name, d in populations.items() if name not in algorithm.batching]
    unused += [d for name, d in central.items() if name not in algorithm.centre.judged]
    return look_over(clients, judged, asked, unused) | _never_learnt(algorithm, populations, central)


def _never_learnt(
    algorithm: Algorithm, populations: Mapping[str, FederatedData], central: Mapping[str, CentralData]
) -> Found:
    """Classes that only the server has, of an algorithm that puts together what clients have learnt."""
    theirs = {int(y) for source in algorithm.batching for y in _classes(populations[source])}
    ours = {int(y) for source in algorithm.centre.guides if source in central for y in _classes(central[source])}
    alone = sorted(ours - theirs)
    if not theirs or not alone:
        return {}
    listed = ", ".join(map(str, alone[:10])) + (", …" if len(alone) > 10 else "")
    return {
        "never learnt": f"Examples with the label {listed} are at the centre only, and {algorithm.name} puts together"
        " what clients have learnt, so that it cannot learn them; choose a method that trains at the centre too, such"
        " as parallel or gradient_2way."
    }


def _classes(data: FederatedData | CentralData) -> Any:
    labels = data.arrays.get("y")
    return np.unique(labels) if labels is not None and labels.ndim == 1 and labels.dtype.kind in "biu" else ()
