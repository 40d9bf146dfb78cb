"""Which layers should be global? Tries the suffixes and prefixes of a model, on validation data.

The paper leaves choosing the split to future work; this is the simple answer: every split is a run, and the best is
read off a table of accuracy against parameters sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mixfed.algorithms.local_global import global_layers, layers
from mixfed.errors import InputError
from mixfed.experiments.build import build
from mixfed.experiments.networks import build_model
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.toml import resolve

METRIC = "accuracy"


@dataclass(frozen=True)
class Split:
    """One way to cut the model, and how it did on the clients' own and on all validation examples."""

    side: str
    layers: int
    parameters: int
    sent: int
    local: float
    new: float


def search(recipe: Recipe, say: Callable[[str], None] = lambda sentence: None) -> Iterator[Split]:
    """Runs lg_fedavg with every suffix (none to all) and every proper prefix of the model's layers global."""
    if not (recipe.data.validation and recipe.data.own_validation):
        raise InputError("A split is chosen on validation data; set data.validation and data.own_validation above 0.")
    scenario = build_scenario(recipe)
    model = build_model(recipe, scenario)
    sizes = {name: x.numel() for name, x in model.trained(model.initial()).items()}
    count = len(layers(model))
    for side, number in [("last", n) for n in range(count + 1)] + [("first", n) for n in range(1, count)]:
        say(f"{side} {number} of {count} layers")
        result = build(_with_split(recipe, side, number), scenario).run()
        is_global = global_layers(model, number, side)
        yield Split(
            side,
            number,
            sum(size for name, size in sizes.items() if is_global(name)),
            (result.ledger["bytes_down"] + result.ledger["bytes_up"]) // model.dtype.itemsize,
            result.metrics[f"{METRIC}_local"],
            result.metrics[f"{METRIC}_new"],
        )


def best_of_both(splits: Sequence[Split]) -> Split:
    """The split with the largest sum of the accuracies on known and on unknown devices."""
    return max(splits, key=lambda split: split.local + split.new)


def _with_split(recipe: Recipe, side: str, number: int) -> Recipe:
    table: dict[str, Any] = recipe.table()
    options = table["algorithms"].get("lg_fedavg", {}) | {"side": side, "layers": number}
    options.pop("names", None)
    table["algorithm"] = "lg_fedavg"
    table["algorithms"] = table["algorithms"] | {"lg_fedavg": options}
    table["evaluate"] |= {"on": "validation", "metrics": [METRIC], "sets": ["local", "new"], "every": recipe.rounds}
    return resolve(table)
