"""The auxiliary model of a recipe: beside the network's head, in the clients' training, and in the evaluation."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from mixfed import rng
from mixfed.algorithms.fair import Minimax
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import gather
from mixfed.core.loop import Evaluate
from mixfed.core.model import Forward
from mixfed.core.train import LocalTrainer
from mixfed.data.batch import Criterion
from mixfed.data.scenario import Scenario
from mixfed.data.store import FederatedData
from mixfed.errors import InputError, explained
from mixfed.evaluate.fairness import adversary_test, postfit_test
from mixfed.experiments.recipe import Recipe
from mixfed.models.parts import first_only, summed, with_auxiliary


def beside_head(
    recipe: Recipe, scenario: Scenario, network: nn.Module, criterion: Criterion
) -> tuple[nn.Module, Criterion, Forward | None]:
    """The network with the recipe's auxiliary model, its loss, and how it is called."""
    how = recipe.auxiliary
    whole = getattr(network, "takes_batch", False)  # a network of several inputs
    if how.kind == "none":
        return network, criterion, (lambda network, batch: network(batch)) if whole else None
    if whole:
        raise InputError(f"The network '{recipe.model.name}' cannot have an auxiliary model beside its head.")
    example = gather(scenario.clients, np.zeros(1, np.int64))
    classes = scenario.source.classes or 1
    if how.kind == "adversary":
        if "protected" not in example:
            raise InputError("An adversary reads protected attributes; name them in data.protected.")
        classes = example["protected"].shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key(recipe.seed, "auxiliary"))
        with explained("The auxiliary model cannot be built so"):
            parts = with_auxiliary(
                network,
                example["x"][0],
                how.kind,
                layers=how.layers,
                classes=classes,
                hidden=how.hidden,
                dropout=how.dropout,
            )
    joint = first_only(criterion) if how.kind == "adversary" else summed(criterion, how.weight)
    return parts, joint, lambda network, batch: network(batch)


def against_adversary(recipe: Recipe, trainer: LocalTrainer) -> LocalTrainer:
    """The clients' training, as a minimax where the recipe has an adversary."""
    how = recipe.auxiliary
    if how.kind != "adversary":
        return trainer
    return Minimax(
        trainer.model,
        trainer.optimizer,
        trainer.batching,
        trainer.clip,
        trainer.loss,
        strength=how.weight,
        pretrain=how.pretrain,
        adversary_steps=how.steps,
        in_turn=how.in_turn,
    )


def adversary_tests(recipe: Recipe, scenario: Scenario, algorithm: Algorithm, own: FederatedData) -> list[Evaluate]:
    """What trained adversaries and fresh ones read from representations, as far as the recipe asks for it."""
    sets, how = recipe.evaluate.sets, recipe.auxiliary
    module = algorithm.model.module()
    found = [adversary_test(algorithm, module, own)] if "adversary" in sets else []
    if "postfit" in sets:
        found.append(postfit_test(algorithm, module, scenario.clients, own, hidden=how.hidden, seed=recipe.seed))
    return found
