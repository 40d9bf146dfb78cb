"""From a recipe to its network and its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mixfed import rng
from mixfed.core.compatible import check_compatible
from mixfed.core.model import Model
from mixfed.core.registry import CRITERIA
from mixfed.data.batch import Criterion
from mixfed.data.scenario import Scenario
from mixfed.data.sources import Source
from mixfed.errors import InputError, explained
from mixfed.experiments import own
from mixfed.experiments.auxiliary import beside_head
from mixfed.experiments.recipe import ModelSection, Recipe
from mixfed.experiments.schema import is_own, parameters
from mixfed.models import MODELS
from mixfed.models.augment import augment
from mixfed.models.chain import Chain
from mixfed.models.weights import load_weights


def build_model(recipe: Recipe, scenario: Scenario) -> Model:
    """The network, started from (seed, "model"), in the recipe's precision on its device."""
    section = recipe.model
    _refuse_measuring_words(recipe, scenario)
    module = build_network(recipe, sizes_of(recipe, scenario))
    module, criterion, forward = beside_head(recipe, scenario, module, _criterion(recipe))
    model = Model(
        module,
        criterion,
        forward=forward,
        frozen=section.frozen,
        buffers=section.buffers,
        dtype=getattr(torch, section.dtype),
        device=recipe.device,
        meaning=scenario.meaning(),
    )
    readers = text_readers(scenario)
    check_compatible(model, scenario.test, "the test examples", readers)
    if scenario.central is not None and recipe.data.central.kind != "other":  # whose labels are not the model's
        check_compatible(model, scenario.central, "the central examples", readers)
    return model


def _refuse_measuring_words(recipe: Recipe, scenario: Scenario) -> None:
    """Classes have numbers by their alphabet, whose distances mean nothing."""
    names = scenario.meaning().names
    if recipe.model.criterion == "squared_error" and scenario.source.encoding is not None and names:
        told = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
        raise InputError(f"The labels are classes ({told}), and squared_error is for measurements; take cross_entropy.")


def text_readers(scenario: Scenario) -> str:
    """The packaged network for the examples, if these are texts: with a label each, or one at every position."""
    if scenario.source.vocabulary is None:
        return ""
    return "'bilstm'" if scenario.test.arrays["y"].ndim == 1 else "'gru'"


def build_network(recipe: Recipe, sizes: dict[str, int]) -> nn.Module:
    """What trains: the network, or the parts of it that the recipe names."""
    return augment(_chained(whole_network(recipe, sizes), recipe.model.trained), recipe.model.augment)


def answering_network(recipe: Recipe, sizes: dict[str, int]) -> nn.Module:
    """What answers to examples as they are: the parts that are run once, and on their features those that train."""
    return _chained(whole_network(recipe, sizes), [*recipe.model.cached, *recipe.model.trained])


def _chained(network: nn.Module, steps: Sequence[str]) -> nn.Module:
    return Chain(network, steps) if steps else network


def whole_network(recipe: Recipe, sizes: dict[str, int]) -> nn.Module:
    """The network itself, with the ``sizes`` that the data determine, as it is before any training."""
    section = recipe.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(recipe.seed, "model"))
        module = _made(_maker(recipe), section, sizes)
    if section.weights:
        load_weights(module, own.file_of(section.weights, recipe.home, "model.weights"), section.weights_parts)
    return module


def _maker(recipe: Recipe) -> Callable[..., nn.Module]:
    name = recipe.model.name
    return own.find(name, recipe.home, "model.name") if is_own(name) else MODELS[name]


def _made(make: Callable[..., nn.Module], section: ModelSection, sizes: dict[str, int]) -> nn.Module:
    """The network, of which a class or function of the user's own may make anything."""
    what = f"The network '{section.name}' cannot be built so"
    with explained(what):
        try:
            module = make(**sizes | section.options)
        except TypeError as error:
            raise InputError(f"{what}: {str(error).rstrip('.')}.") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"'{section.name}' made a {type(module).__name__}, not a torch.nn.Module.")
    return module


def _criterion(recipe: Recipe) -> Criterion:
    name = recipe.model.criterion
    criterion: Criterion = (
        own.load_function(name, recipe.home, "model.criterion") if is_own(name) else CRITERIA[name].load()
    )
    return criterion


def _outputs(criterion: str, source: Source, labels: NDArray[Any] | None) -> int | None:
    """How many outputs a model needs: one for each class, or for each number of a label."""
    if criterion == "cross_entropy" or (is_own(criterion) and source.classes is not None):
        return source.classes
    return 1 if criterion != "squared_error" or labels is None else int(np.prod(labels.shape[1:]))


_ALSO_CALLED = {"num_classes": "outputs", "in_channels": "channels", "in_chans": "channels"}
"""What networks of other packages call the sizes that the data determine."""
_OF_DATA = ("inputs", "outputs", "vocabulary", "characters", "items", "size", "channels", *_ALSO_CALLED)


def _way_to(size: str, scenario: Scenario) -> str:
    """What may give a network a size that the data do not; a setting that is no size of data is the user's to give."""
    if size not in _OF_DATA:
        return "; give it a value"
    if text_readers(scenario):
        return f"; the examples are texts, which {text_readers(scenario)} reads"
    if size == "outputs" and scenario.source.encoding:
        return "; if its labels are classes, data.labels = 'classes' numbers them from 0"
    return ""


def sizes_of(recipe: Recipe, scenario: Scenario) -> dict[str, int]:
    """What a network needs to know that the data determine."""
    section, source, clients = recipe.model, scenario.source, scenario.clients
    if "x" not in clients.arrays:
        return {}
    shape = (source.train if section.cached else clients.arrays)["x"].shape[1:]
    wanted = parameters(_maker(recipe))
    outputs = _outputs(section.criterion, source, clients.arrays.get("y"))
    known = {"inputs": int(np.prod(shape)), "outputs": outputs}
    known |= {"vocabulary": source.vocabulary or source.classes, "characters": source.vocabulary}
    known["items"] = source.classes
    known["size"] = shape[-1] if shape else None
    if len(shape) == 3:
        known["channels"] = shape[0]
    known |= {name: known.get(ours) for name, ours in _ALSO_CALLED.items()}
    found = {name: int(value) for name, value in known.items() if name in wanted and value is not None}
    for name in wanted:
        if wanted[name].required and name not in found and name not in section.options:
            told = f"The network '{section.name}' needs model.{name}, which this source does not determine"
            raise InputError(f"{told}{_way_to(name, scenario)}.")
    return found
