"""From a recipe to something that runs: its data, model, trainers, algorithm and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mixfed import rng
from mixfed._schema import parameters
from mixfed.algorithms import ALGORITHMS, Setup
from mixfed.backends.simulator import Simulator
from mixfed.batches import Batching
from mixfed.checkpoint import Checkpoints
from mixfed.core import Algorithm
from mixfed.data._arrays import join
from mixfed.data.partition import label_split
from mixfed.data.scenario import Scenario, apart, deal
from mixfed.data.sources import Examples, Source, load_source
from mixfed.data.store import CentralData, FederatedData, spread
from mixfed.errors import InputError
from mixfed.fit import check_fit
from mixfed.local import LocalTrainer
from mixfed.losses import CRITERIA
from mixfed.measure.metrics import evaluator
from mixfed.model import Model
from mixfed.models import MODELS
from mixfed.recipe import ModelSection, Recipe, Training, optimizer_of
from mixfed.run import Callback, Evaluate, Result, run


@dataclass(frozen=True)
class Experiment:
    """A recipe made concrete."""

    recipe: Recipe
    scenario: Scenario
    algorithm: Algorithm
    clients: FederatedData
    evaluate: Evaluate

    def run(
        self,
        *,
        callbacks: Sequence[Callback] = (),
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> Result:
        """Trains as the recipe says."""
        recipe, how = self.recipe, self.recipe.simulator
        simulator = Simulator(
            how.executor, threads=how.threads or None, chunk=how.chunk or None, memory=how.memory, say=say
        )
        return run(
            self.algorithm,
            self.clients,
            rounds=recipe.rounds,
            cohort=recipe.cohort,
            central=self.scenario.central,
            seed=recipe.seed,
            evaluate=self.evaluate,
            every=recipe.evaluate.every,
            backend=simulator,
            callbacks=callbacks,
            checkpoints=checkpoints,
            resume=resume,
            should_stop=should_stop,
        )


def build(recipe: Recipe, scenario: Scenario | None = None) -> Experiment:
    """The experiment of a recipe; a scenario that was built before for the same data and seed can be given."""
    scenario = scenario or build_scenario(recipe)
    model = build_model(recipe, scenario)
    entry = ALGORITHMS[recipe.algorithm]
    setup = Setup(
        client=_trainer(recipe.client, model, "client"),
        server=optimizer_of(recipe.server),
        rounds=recipe.rounds,
        centre=None if scenario.central is None else _trainer(recipe.central, model, "central"),
        merge=optimizer_of(recipe.merge),
        weights=(recipe.mixing.w_f, recipe.mixing.w_c),
    )
    algorithm = entry.make(setup, **recipe.algorithm_options())
    clients = scenario.clients
    if entry.oracle and scenario.central is not None:
        clients = spread(scenario.central, clients, recipe.seed)
    evaluate = evaluator(
        model, _evaluation_sets(recipe, scenario), recipe.evaluate.metrics, personal=algorithm.personal
    )
    return Experiment(recipe, scenario, algorithm, clients, evaluate)


def build_scenario(recipe: Recipe) -> Scenario:
    """Loads the source and deals its examples to clients and centre; held-out examples are the same for all seeds."""
    data = recipe.data
    source = load_source(data.source, data.folder or None, **data.options)
    people = None if source.natural_clients is None else source.natural_clients["train"]
    train, test = [Examples(source.train, people)], [Examples(source.test, None)]
    if data.central.kind == "source":
        if source.centre is None:
            raise InputError(
                f"The source '{data.source}' has nothing for the centre; choose another data.central.kind."
            )
        train.append(source.centre)
    if data.held_out:
        train, test = apart(train, data.held_out, "test", whole_people=True)
    if not len(test[0]):
        raise InputError(f"The source '{data.source}' has no test part; set data.held_out to hold people out for it.")
    evaluation = {"test": test}
    if data.validation:
        natural = data.partition.kind == "natural"
        train, evaluation["validation"] = apart(train, data.validation, "validation", whole_people=natural)
    on_clients, at_centre = _sides(recipe, train)
    clients = deal(on_clients, data.partition.kind, data.partition.options, recipe.seed, source.prepare)
    together = {name: join([side.arrays for side in sides]) for name, sides in evaluation.items()}
    return Scenario(
        clients=clients,
        central=None if at_centre is None else CentralData(at_centre.arrays, source.prepare),
        test=CentralData(together["test"], source.prepare),
        validation=CentralData(together["validation"], source.prepare) if data.validation else None,
        source=source,
        like_clients={name: _like_clients(recipe, sides) for name, sides in evaluation.items()},
    )


def _like_clients(recipe: Recipe, sides: list[Examples]) -> NDArray[np.bool_] | None:
    """Which of the sides' examples are of the kind that clients hold, if the centre holds another kind."""
    central = recipe.data.central
    if central.kind == "labels":
        return np.isin(sides[0].arrays["y"], central.client_labels)
    return np.arange(sum(map(len, sides))) < len(sides[0]) if central.kind == "source" else None


def _sides(recipe: Recipe, sides: list[Examples]) -> tuple[Examples, Examples | None]:
    """What goes to clients, and what stays at the centre."""
    train, central = sides[0], recipe.data.central
    if central.kind == "none":
        return train, None
    if central.kind == "source":
        return train, sides[1]
    if central.kind == "fraction":
        share = central.fraction
        rows = rng.generator(recipe.seed, "scenario/central").permutation(len(train))
        count = round(share * len(train))
        if not 0 < count < len(train):
            raise InputError(f"data.central.fraction must leave examples on both sides, and {share} does not.")
        return train.rows(np.sort(rows[count:])), train.rows(np.sort(rows[:count]))
    if not central.client_labels:
        raise InputError(
            "With data.central.kind = 'labels', data.central.client_labels says which labels clients hold."
        )
    ours, theirs = label_split(train.arrays["y"], central.client_labels, recipe.seed, central.inside, central.outside)
    return train.rows(ours), train.rows(theirs)


def build_model(recipe: Recipe, scenario: Scenario) -> Model:
    """The network, started from (seed, "model"), in the recipe's precision on its device."""
    section = recipe.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(recipe.seed, "model"))
        try:
            module = MODELS[section.name](**_sizes(section, scenario.source, scenario.clients) | section.options)
        except (RuntimeError, ValueError, ZeroDivisionError) as error:
            raise InputError(
                f"The network '{section.name}' cannot be built so: {str(error).splitlines()[0]}."
            ) from error
    model = Model(
        module,
        CRITERIA[section.criterion],
        buffers=section.buffers,
        dtype=getattr(torch, section.dtype),
        device=usable_device(recipe.device),
    )
    check_fit(model, scenario.test, "the test examples")
    if scenario.central is not None:
        check_fit(model, scenario.central, "the central examples")
    return model


def _sizes(section: ModelSection, source: Source, clients: FederatedData) -> dict[str, int]:
    """What a network needs to know that the data determine."""
    shape = clients.arrays["x"].shape[1:]
    wanted = parameters(MODELS[section.name])
    outputs = 1 if section.criterion != "cross_entropy" else source.classes
    known = {"inputs": int(np.prod(shape)), "outputs": outputs, "vocabulary": source.classes}
    known["size"] = shape[-1] if shape else None
    if len(shape) == 3:
        known["channels"] = shape[0]
    found = {name: int(value) for name, value in known.items() if name in wanted and value is not None}
    for name in wanted:
        if wanted[name].required and name not in found and name not in section.options:
            raise InputError(f"The network '{section.name}' needs model.{name}, which this source does not determine.")
    return found


def _trainer(section: Training, model: Model, name: str) -> LocalTrainer:
    if bool(section.steps) == bool(section.epochs):
        raise InputError(f"Give either {name}.steps or {name}.epochs, and leave the other one 0.")
    batching = Batching(section.batch_size, section.steps or None, section.epochs or None, section.shuffle)
    return LocalTrainer(model, optimizer_of(section), batching, section.clip or None)


def _evaluation_sets(recipe: Recipe, scenario: Scenario) -> dict[str, CentralData]:
    on = recipe.evaluate.on
    return {"" if name == "all" else name: scenario.part(on, name) for name in recipe.evaluate.sets}


def usable_device(name: str) -> torch.device:
    """The device, if this machine has it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"The device '{name}' cannot be used here: {str(error).splitlines()[0].rstrip('.')}."
        ) from error
    return device
