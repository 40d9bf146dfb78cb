"""What a report tells of a run beside its metrics: who holds what, the spread over clients, classes taken for others.

It is found out once, when the run ends, and kept as JSON, so that a report can be made again without the data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mixfed.core.backend import RemoteClients
from mixfed.core.batches import gather
from mixfed.core.loop import Result
from mixfed.data.scenario import Scenario
from mixfed.data.store import CentralData, FederatedData
from mixfed.evaluate.metrics import EXAMPLE_METRICS
from mixfed.evaluate.spread import by_client, confusion
from mixfed.experiments.build import Experiment
from mixfed.experiments.networks import sizes_of
from mixfed.experiments.ownership import shares

MOST_CLIENTS = 500
"""Of so many clients, spread evenly over the list, the metric is measured."""
MOST_CLASSES = 50
TENTH = 10


def facts_of(experiment: Experiment, result: Result) -> dict[str, Any]:
    """All that can be said of this run; what makes no sense for it (classes, where there are none) is left out."""
    found = {
        "holdings": _holdings(experiment.scenario),
        "clients": _clients(experiment, result),
        "confusion": _confusion(experiment, result),
        "network": _network(experiment),
        "answers": experiment.algorithm.model.meaning.to_json(),
    }
    return {name: value for name, value in found.items() if value}


def _holdings(scenario: Scenario) -> dict[str, Any] | None:
    if scenario.clients.arrays.get("y", np.zeros((0, 0))).ndim != 1:
        return None
    central = scenario.central if scenario.central is not None and "y" in scenario.central.arrays else None
    found = shares(scenario.clients, central, names=scenario.source.names.get("y"))
    return {
        "labels": found.words,
        "clients": len(scenario.clients),
        "shown": found.shown.tolist(),
        "table": found.table.tolist(),
        "centre": None if found.centre is None else found.centre.tolist(),
        "sizes": [float(x) for x in np.quantile(found.sizes, (0, 0.1, 0.5, 0.9, 1))],
    }


def _clients(experiment: Experiment, result: Result) -> dict[str, Any] | None:
    """A metric of each client on its own test examples, or on those that it trained on where it keeps none apart."""
    known = [name for name in experiment.recipe.evaluate.metrics if name == "loss" or name in EXAMPLE_METRICS]
    if not known or isinstance(result.privates, RemoteClients):
        return None
    metric = "accuracy" if "accuracy" in known else known[0]
    data, on = _own_examples(experiment)
    holders = np.flatnonzero(data.sizes() > 0)
    if not len(holders):
        return None
    chosen = holders[np.unique(np.linspace(0, len(holders) - 1, min(MOST_CLIENTS, len(holders))).astype(np.int64))]
    values = by_client(experiment.algorithm, result.params, result.privates, data, metric, chosen)
    ordered = np.sort(values)
    few = max(1, len(ordered) // TENTH)
    return {
        "metric": metric,
        "on": on,
        "of": len(data),
        "clients": chosen.tolist(),
        "values": [round(float(x), 5) if np.isfinite(x) else None for x in values],
        "lowest_tenth": float(ordered[:few].mean()),
        "highest_tenth": float(ordered[-few:].mean()),
    }


def _network(experiment: Experiment) -> dict[str, Any]:
    """What it takes to build the network again without the data: sizes, and the kind of its input if it has one."""
    found: dict[str, Any] = {"sizes": sizes_of(experiment.recipe, experiment.scenario)}
    model, test, source = experiment.algorithm.model, experiment.scenario.test, experiment.scenario.source
    if model.takes_x and len(test):
        asked = CentralData(source.train, source.prepare) if experiment.recipe.model.cached else test
        x = gather(asked, np.zeros(1, np.int64))["x"]
        dtype = model.dtype if x.is_floating_point() else x.dtype
        found["input"] = {"shape": list(x.shape[1:]), "dtype": str(dtype).removeprefix("torch.")}
    return found


def _own_examples(experiment: Experiment) -> tuple[FederatedData, str]:
    own = experiment.scenario.own.get("test")
    return (own, "own test examples") if own is not None else (experiment.scenario.clients, "own training examples")


def _confusion(experiment: Experiment, result: Result) -> dict[str, Any] | None:
    scenario, classes = experiment.scenario, experiment.scenario.source.classes
    kind = scenario.test.arrays.get("y", np.zeros((0, 0)))
    if "accuracy" not in experiment.recipe.evaluate.metrics or kind.ndim != 1 or kind.dtype.kind not in "iub":
        return None
    if not classes or classes > MOST_CLASSES or isinstance(result.privates, RemoteClients):
        return None
    own = scenario.own.get("test") if experiment.algorithm.personal else None
    table = confusion(
        experiment.algorithm, result.params, result.privates, scenario.test if own is None else own, classes
    )
    names = scenario.source.names.get("y") or tuple(str(i) for i in range(classes))
    of = "test examples" if own is None else "own models on own tests"
    return {"labels": list(names), "table": table.tolist(), "of": of}
