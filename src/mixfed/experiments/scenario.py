"""From a recipe's data section to who holds what: clients, the centre, the test and the validation part."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import numpy as np
from numpy.typing import NDArray

from mixfed import rng
from mixfed.data._arrays import join
from mixfed.data.images import images_like
from mixfed.data.partition import label_split
from mixfed.data.scaling import fit_scaling, scaled
from mixfed.data.scenario import (
    PARTITIONS,
    Scenario,
    apart,
    deal,
    join_device,
    keep_own,
    with_label_noise,
)
from mixfed.data.sources import Examples, Source, load_source
from mixfed.data.sources.given import as_source, called
from mixfed.data.store import CentralData
from mixfed.errors import InputError
from mixfed.experiments import own
from mixfed.experiments.recipe import Partition, Recipe
from mixfed.experiments.schema import check, is_own


def build_scenario(recipe: Recipe) -> Scenario:
    """Who holds what, with features in the place of examples where the recipe has parts of the network run once."""
    return featured(recipe, _dealt(recipe))


def featured(recipe: Recipe, scenario: Scenario) -> Scenario:
    """The scenario as the recipe's network takes it: with features, or as it is."""
    if not recipe.model.cached:
        return scenario
    from mixfed.experiments.features import with_features

    return with_features(recipe, scenario)


def _dealt(recipe: Recipe) -> Scenario:
    """Loads the source and deals its examples to clients and centre; held-out examples are the same for all seeds."""
    if recipe.theory.rho:
        raise InputError(f"{recipe.name} has curves in closed form and no data to deal; draw them with 'mixfed run'.")
    source = open_source(recipe)
    if isinstance(source, Scenario):
        return source
    recipe = _with_given_centre(recipe, source)
    data = recipe.data
    people = None if source.natural_clients is None else source.natural_clients["train"]
    train, test = [Examples(source.train, people)], [Examples(source.test, None)]
    if data.central.kind in ("source", "file"):
        if source.centre is None:
            raise InputError(
                f"The source '{data.source}' has nothing for the centre; choose another data.central.kind."
            )
        train.append(source.centre)
    train, test = _tested(recipe, train, test)
    of_test: Examples | None = None
    if data.central.kind == "test":
        test[0], of_test = _from_test(test[0], data.central.examples)
    evaluation = {"test": test}
    if data.validation:
        by_examples = data.source == "files" and not data.held_out  # as the test is
        natural = data.partition.kind == "natural" and not by_examples
        train, evaluation["validation"] = apart(train, data.validation, "validation", whole_people=natural)
    scaling = fit_scaling(source.scaled, [side.arrays for side in train]) if source.scaled else None
    if scaling is not None:
        train = [scaled(side, scaling) for side in train]
        evaluation = {name: [scaled(side, scaling) for side in sides] for name, sides in evaluation.items()}
        of_test = of_test and scaled(of_test, scaling)
    on_clients, at_centre = _sides(recipe, train, source)
    at_centre, of_centre = _kept_apart(recipe, of_test or at_centre)
    together = {name: join([side.arrays for side in sides]) for name, sides in evaluation.items()}
    how = data.partition
    _require_what_it_deals_by(how, on_clients, _files(recipe))
    clients = deal(on_clients, how.kind, how.options, recipe.seed, source.prepare, how.by)
    kept = keep_own(clients, {"test": data.own_test, "validation": data.own_validation}, recipe.seed)
    if data.label_noise and source.classes is None:
        raise InputError("data.label_noise needs examples that have classes, and these have none; leave it at 0.")
    if data.joining.round:
        if source.train["x"].ndim < 3 or source.train["x"].shape[-1] != source.train["x"].shape[-2]:
            raise InputError("Only square images can be turned, so data.joining needs a source of images.")
        sizes = {"train": data.joining.train, "test": data.joining.test, "validation": data.joining.test}
        kept = join_device(kept, source, sizes, data.joining.degrees, recipe.seed)
    return Scenario(
        clients=with_label_noise(kept.pop("train"), data.label_noise, source.classes, recipe.seed),
        central=None if at_centre is None else CentralData(at_centre.arrays, source.prepare),
        test=CentralData(together["test"], source.prepare),
        validation=CentralData(together["validation"], source.prepare) if data.validation else None,
        source=source,
        like_clients={name: _like_clients(recipe, sides, source) for name, sides in evaluation.items()},
        own=kept,
        of_centre=None if of_centre is None else CentralData(of_centre.arrays, source.prepare),
        scaling=scaling,
    )


def open_source(recipe: Recipe) -> Source | Scenario:
    """The source of a recipe: a known one, the user's files, or what a function of the user's own returns.

    Such a function may also say who holds what, and then nothing is left to deal.
    """
    data = recipe.data
    beside = data.folder or recipe.home or None
    if is_own(data.source):
        found = called(own.find(data.source, recipe.home, "data.source"), data.source, beside, data.options)
        return found if isinstance(found, Scenario) else as_source(found, data.source)
    if data.source == "files":
        return load_source("files", beside, **data.options, centre=data.central.file)
    return load_source(data.source, data.folder or None, **data.options)


def _with_given_centre(recipe: Recipe, source: Source) -> Recipe:
    """The centre holds what a function of the user's own has for it, unless the recipe says otherwise."""
    central = recipe.data.central
    if not is_own(recipe.data.source) or source.centre is None or central.kind != "none":
        return recipe
    return replace(recipe, data=replace(recipe.data, central=replace(central, kind="file")))


def _tested(recipe: Recipe, train: list[Examples], test: list[Examples]) -> tuple[list[Examples], list[Examples]]:
    """What is trained and what is tested on: the source's own test part, people, or a share of the examples."""
    data = recipe.data
    if (data.held_out or data.test_share) and data.source == "files" and len(test[0]):
        raise InputError("There is a file of test examples; leave out data.test, or data.held_out and data.test_share.")
    if data.held_out:
        return apart(train, data.held_out, "test", whole_people=True)
    if data.test_share:
        return apart(train, data.test_share, "test", whole_people=False)
    if not len(test[0]):
        raise InputError(
            f"The source '{data.source}' has no test part; set data.test_share to a share of the examples, or"
            " data.held_out to a share of the people" + (", or name a file in data.test." if _files(recipe) else ".")
        )
    return train, test


def _files(recipe: Recipe) -> bool:
    return recipe.data.source == "files"


def _require_what_it_deals_by(how: Partition, examples: Examples, of_files: bool) -> None:
    """Refuses a partition that lacks a setting, or whose people or labels the examples do not have."""
    wanted = signature(PARTITIONS[how.kind]).parameters
    if "keys" in wanted and examples.people is None:
        raise InputError(
            "This source has no natural clients; set data.partition.clients to deal its examples to so many, or choose"
            " another data.partition.kind" + (", or name the column of keys in data.client." if of_files else ".")
        )
    if "labels" in wanted and (how.by not in examples.arrays or examples.arrays[how.by].ndim != 1):
        fields = ", ".join(name for name, values in examples.arrays.items() if values.ndim == 1)
        raise InputError(f"The examples have no labels '{how.by}' (data.partition.by); they have {fields}.")


def _kept_apart(recipe: Recipe, at_centre: Examples | None) -> tuple[Examples | None, Examples | None]:
    """What the centre trains on, and what it keeps apart of it to tune on."""
    share = recipe.data.central.validation
    if not share:
        return at_centre, None
    if at_centre is None or recipe.data.central.kind == "other":
        raise InputError(
            "data.central.validation keeps examples of the task at the centre apart, and the centre holds none."
        )
    (rest,), (kept,) = apart([at_centre], share, "the centre's validation", whole_people=False)
    return rest, kept


def _like_clients(recipe: Recipe, sides: list[Examples], source: Source) -> NDArray[np.bool_] | None:
    """Which of the sides' examples are of the kind that clients hold, if the centre holds another kind."""
    kind = recipe.data.central.kind
    if kind == "labels":
        return np.isin(sides[0].arrays["y"], _client_labels(recipe, source))
    apart = kind == "source" or (kind == "file" and len(sides) > 1)
    return np.arange(sum(map(len, sides))) < len(sides[0]) if apart else None


def _client_labels(recipe: Recipe, source: Source) -> list[int]:
    """The labels that clients hold as numbers; a recipe may give the names of classes."""
    names = source.names.get("y", ())
    found = []
    for label in recipe.data.central.client_labels:
        if isinstance(label, str) and label not in names:
            told = f"there are {', '.join(names)}" if names else "this source has numbers only"
            raise InputError(f"'{label}' in data.central.client_labels is no class; {told}.")
        found.append(names.index(label) if isinstance(label, str) else check(label, int, "data.central.client_labels"))
    return found


def _sides(recipe: Recipe, sides: list[Examples], source: Source) -> tuple[Examples, Examples | None]:
    """What goes to clients, and what stays at the centre."""
    train, central = sides[0], recipe.data.central
    if central.kind in ("none", "test"):
        return train, None
    if central.kind == "other":
        return train, _from_another(recipe, train)
    if central.kind in ("source", "file"):
        return train, sides[1]
    if central.kind == "people":
        (rest,), (held,) = apart([train], central.fraction, "centre", whole_people=True)
        return rest, held
    if central.kind == "fraction":
        share = central.fraction
        rows = rng.generator(recipe.seed, "scenario/central").permutation(len(train))
        count = round(share * len(train))
        if not 0 < count < len(train):
            raise InputError(f"data.central.fraction must leave examples on both sides, and {share} does not.")
        return train.rows(np.sort(rows[count:])), train.rows(np.sort(rows[:count]))
    labels = _client_labels(recipe, source)
    ours, theirs = label_split(train.arrays["y"], labels, recipe.seed, central.inside, central.outside)
    return train.rows(ours), train.rows(theirs)


def _from_test(test: Examples, count: int) -> tuple[Examples, Examples]:
    """The test part without so many of its examples, and those; the same for every seed."""
    if not 0 < count < len(test):
        raise InputError(f"data.central.examples must be 1 to {len(test) - 1} of the test part, not {count}.")
    rows = rng.generator(0, "scenario/of-test").permutation(len(test))
    return test.rows(np.sort(rows[count:])), test.rows(np.sort(rows[:count]))


def _from_another(recipe: Recipe, train: Examples) -> Examples:
    """Examples of another source, as images of the clients' shape."""
    central = recipe.data.central
    other = load_source(central.source, recipe.data.folder or None).train
    count = central.examples or len(other["y"])
    if not 0 < count <= len(other["y"]):
        raise InputError(f"The source '{central.source}' has {len(other['y'])} examples, not {count}.")
    rows = np.sort(rng.generator(recipe.seed, "scenario/other").permutation(len(other["y"]))[:count])
    return Examples({"x": images_like(other["x"][rows], train.arrays["x"]), "y": other["y"][rows]}, None)
