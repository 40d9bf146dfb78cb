"""What no data could mend in a recipe is refused when it is completed, before PyTorch is loaded.

Each value was checked by its type and range then (:mod:`mixfed.experiments.schema`); here is what settings must be for
each other. What depends on the data, or on the network, is refused by those who know them. A source of the user's own
may bring a centre, a validation part and clients' own test examples that the recipe does not speak of.
"""

from __future__ import annotations

from mixfed.algorithms.registry import ALGORITHMS, refuse_without_centre
from mixfed.core.delays import DELAYS, Dropouts, SpeedClasses
from mixfed.core.schedule import Joining, Late, Schedule
from mixfed.data.scenario import GIVEN_BY_DATA, PARTITIONS
from mixfed.data.sources import SOURCES
from mixfed.errors import InputError
from mixfed.experiments.recipe import LOCAL_PERCENTILES, Recipe, Training
from mixfed.experiments.schema import is_own, one_of, parameters

BY_CLASS = "class_accuracy"
"""The metric that has a number for each class."""


def check_beforehand(recipe: Recipe) -> None:
    """Refuses settings of which no run could be made, with one sentence that names them."""
    if recipe.mixing.w_f == recipe.mixing.w_c == 0:
        raise InputError("The weights mixing.w_f and mixing.w_c of the mixed loss cannot both be 0.")
    if recipe.theory.rho:
        return
    _check_data(recipe)
    _check_training(recipe)
    _check_evaluation(recipe)
    build_schedule(recipe)


def require_length(section: Training, name: str) -> None:
    """Refuses training of no length, or of two."""
    if bool(section.steps) == bool(section.epochs):
        raise InputError(f"Give either {name}.steps or {name}.epochs, and leave the other one 0.")


def build_schedule(recipe: Recipe) -> Schedule:
    """Who is asked, and when they report."""
    section = recipe.schedule
    for name, option in parameters(DELAYS[section.delay]).items():
        if option.required and name not in section.options:
            raise InputError(f"The delay '{section.delay}' needs schedule.{name}.")
    delays = DELAYS[section.delay](**section.options)
    if section.speeds or section.shares:
        delays = SpeedClasses(delays, section.speeds, section.shares)
    if section.dropout:
        delays = Dropouts(delays, section.dropout)
    late: Late = "" if section.late == "auto" else section.late
    how = recipe.data.joining
    joining = Joining(how.round, how.fraction, how.settle) if how.round else None
    return Schedule(recipe.cohort, delays, section.buffer, section.concurrency, late, section.patience, joining)


def no_part(on: str) -> InputError:
    """The refusal of an evaluation on examples that were not kept apart."""
    setting = "data.central.validation" if on == "centre" else "data.validation"
    of_task = "" if on == "centre" else ", or give a Task such examples"
    return InputError(f"There is no {on} part to evaluate on; set {setting} to a share above 0{of_task}.")


def check_own_set(recipe: Recipe, name: str, *, there: bool) -> None:
    """Refuses an evaluation set of clients' own examples (``there`` are some) that the recipe does not have."""
    on = recipe.evaluate.on
    if name in ("old", "joined") and not recipe.data.joining.round:
        raise InputError(f"No device joins, so there is no evaluation set '{name}'; set data.joining.round.")
    if on == "centre":
        raise InputError(f"The centre's examples belong to no client, so there is no evaluation set '{name}' of them.")
    if not there:
        raise InputError(
            f"Clients have no {on} examples of their own for the evaluation set '{name}';"
            f" set data.own_{on} to a share above 0."
        )


def _check_data(recipe: Recipe) -> None:
    data, how, central = recipe.data, recipe.data.partition, recipe.data.central
    for name, option in parameters(PARTITIONS[how.kind], GIVEN_BY_DATA).items():
        if option.required and name not in how.options:
            raise InputError(f"The partition '{how.kind}' needs data.partition.{name}.")
    if data.held_out and data.test_share:
        raise InputError("Give either data.held_out, a share of people to test on, or data.test_share, of examples.")
    if central.kind == "file" and data.source != "files":
        raise InputError("data.central.kind = 'file' is for data.source = 'files'; choose another kind.")
    if central.kind == "labels" and not central.client_labels:
        raise InputError(
            "With data.central.kind = 'labels', data.central.client_labels says which labels clients hold."
        )
    if central.kind in ("fraction", "people") and not central.fraction:
        raise InputError(f"With data.central.kind = '{central.kind}', data.central.fraction is a share above 0.")
    if central.kind == "other":
        one_of(central.source, SOURCES, "data.central.source")
    if central.validation and central.kind in ("none", "other") and not is_own(data.source):
        raise InputError(
            "data.central.validation keeps examples of the task at the centre apart, and the centre holds none."
        )


def _check_training(recipe: Recipe) -> None:
    require_length(recipe.client, "client")
    if recipe.data.central.kind != "none":
        require_length(recipe.central, "central")
    options = recipe.algorithm_options()
    if recipe.algorithm == "lg_fedavg" and options.get("warm_start", 0) >= recipe.rounds:
        raise InputError(
            f"A warm start of {options['warm_start']} rounds leaves no round of {recipe.rounds} for what is local;"
            " choose a warm start of fewer rounds."
        )
    names = {recipe.algorithm, options.get("base", "fedavg")} if recipe.algorithm not in recipe.methods else set()
    centred = recipe.data.central.kind != "none" or is_own(recipe.data.source)
    for name in names:
        entry = ALGORITHMS[name]
        if entry.centre and not centred and not (entry.mixes and recipe.regulariser.name != "none"):
            refuse_without_centre()
    if recipe.model.augment and recipe.model.cached:
        raise InputError("model.augment changes images in every step, so that model.cached cannot run them once.")


def require_one_number(metric: str) -> None:
    """Refuses to choose by a metric that has a number for each class."""
    if metric.startswith(BY_CLASS):
        raise InputError(
            f"There is a {BY_CLASS} for each class, and a choice is made by one number; take accuracy or f1, which are"
            " over all classes."
        )


def _check_evaluation(recipe: Recipe) -> None:
    sets, data = recipe.evaluate.sets, recipe.data
    require_one_number(recipe.stop.metric)
    if {"adversary", "postfit"} & set(sets) and recipe.auxiliary.kind != "adversary":
        raise InputError("There is no adversary to evaluate; set auxiliary.kind to 'adversary'.")
    if is_own(data.source):
        return
    kept = {"test": 1.0, "validation": data.validation, "centre": data.central.validation}
    on = recipe.evaluate.on if {"all", "clients", "centre", "new", "averaged"} & set(sets) else "test"
    for part in (on, "validation" if recipe.stop.metric else "test"):
        if not kept[part]:
            raise no_part(part)
    own = {"test": data.own_test, "validation": data.own_validation}
    for name in sets:
        if name in ("local", "old", "joined", *LOCAL_PERCENTILES):
            check_own_set(recipe, name, there=bool(own.get(recipe.evaluate.on)))
