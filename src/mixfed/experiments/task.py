"""Objects of your own as an experiment, in place of a recipe: a network, clients, a test set, perhaps a centre."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mixfed.core.model import Model, check_criterion
from mixfed.data.scenario import Scenario
from mixfed.data.sources import Source
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.experiments import objects
from mixfed.experiments.request import Request
from mixfed.experiments.schema import Table

_OWN = ("data", "model", "methods", "home", "base")
"""Keys of a recipe that a task makes of its objects."""


class Task(Request):
    """A network, who holds what, and settings by the names that recipes use.

    ``Task(network, clients, test, centre=data, rounds=60, cohort=10, client={"learning_rate": 0.1, "steps": 5})``.

    ``network`` is a module, which every run begins with as it is now. ``clients`` are :class:`FederatedData`; ``test``,
    ``centre`` and ``validation`` are :class:`CentralData` or mappings of arrays. ``own_test`` are examples that each
    client keeps apart. ``criterion`` is a name or a function of outputs and batch, and so are the metrics in
    ``evaluate={"metrics": […]}``. All other keywords are keys and
    sections of a recipe (docs/recipes.md); dotted keys go into ``settings``. ``names`` are words for the classes.
    """

    def __init__(
        self,
        network: nn.Module,
        clients: FederatedData,
        test: CentralData | Mapping[str, Any],
        *,
        centre: CentralData | Mapping[str, Any] | None = None,
        validation: CentralData | Mapping[str, Any] | None = None,
        own_test: FederatedData | None = None,
        criterion: str | Callable[..., Any] = "cross_entropy",
        model: Mapping[str, Any] | None = None,
        names: tuple[str, ...] = (),
        name: str = "task",
        settings: Mapping[str, Any] | None = None,
        **recipe: Any,
    ) -> None:
        if isinstance(network, Model):
            raise InputError("A task takes the network itself, a torch.nn.Module, and the criterion beside it.")
        if not isinstance(network, nn.Module):
            raise InputError(f"The network of a task is a torch.nn.Module, not a {type(network).__name__}.")
        if not isinstance(clients, FederatedData):
            raise InputError(f"The clients of a task are FederatedData, not a {type(clients).__name__}.")
        if not isinstance(criterion, str):
            check_criterion(criterion)
        for key in _OWN:
            if key in recipe:
                raise InputError(f"A task makes '{key}' of its objects; leave it out.")
        self.settings, self.tuned = [], None
        self.options = objects.plain(settings or {})
        self.recipe = name
        self.network = copy.deepcopy(network)
        self.scenario = _scenario(clients, test, centre, validation, own_test, names)
        self._table: Table = {
            **_as_recipe(recipe),
            "name": name,
            "data": {"source": objects.name_scenario(self.scenario)},
            "model": {
                **(model or {}),
                "name": objects.name_network(self.network),
                "criterion": criterion if isinstance(criterion, str) else objects.name_function("criterion", criterion),
            },
        }

    def base(self) -> Table:
        """The recipe of this task."""
        return copy.deepcopy(self._table)

    def __repr__(self) -> str:
        held = "" if self.scenario.central is None else f", {len(self.scenario.central):,} examples at the centre"
        return (
            f"Task({self.recipe}: {type(self.network).__name__}, {len(self.scenario.clients):,} clients with"
            f" {self.scenario.clients.examples:,} examples{held}, {len(self.scenario.test):,} test examples)"
        )


def _as_recipe(given: Mapping[str, Any]) -> Table:
    """Settings as a recipe holds them: numbers of Python, and metrics that are functions by their names."""
    table: Table = objects.plain(given)
    evaluate = table.get("evaluate")
    if not isinstance(evaluate, dict) or not isinstance(evaluate.get("metrics"), list):
        return table
    metrics = [m if isinstance(m, str) else objects.name_shown("metric", m) for m in evaluate["metrics"]]
    return table | {"evaluate": evaluate | {"metrics": metrics}}


def _scenario(
    clients: FederatedData, test: Any, centre: Any, validation: Any, own_test: FederatedData | None, names: Any
) -> Scenario:
    test = objects.of_arrays(test, "test")
    centre = None if centre is None else objects.of_arrays(centre, "central")
    validation = None if validation is None else objects.of_arrays(validation, "validation")
    labels = clients.arrays.get("y")
    classes = None
    if isinstance(names, str):
        raise InputError(f"The names of the classes are a list, such as ['{names}'], and not a text.")
    if labels is not None and labels.dtype.kind in "iub":
        sides = [labels, *(d.arrays["y"] for d in (test, centre) if d is not None and "y" in d.arrays)]
        classes = max([len(names), *(int(y.max()) + 1 for y in sides if len(y))])
        if 0 < len(names) < classes:
            raise InputError(f"There are {len(names)} names for {classes} classes; give a name for each label from 0.")
    known = {"y": tuple(names)} if names else {}
    source = Source(clients.arrays, test.arrays, clients.prepare, classes, None, "objects of a program", "", known)
    return Scenario(clients, centre, test, validation, source, own={"test": own_test} if own_test is not None else {})
