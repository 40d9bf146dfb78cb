"""Measurements that are no training: the probe of a recipe, and a theory's closed form beside what is measured."""

from __future__ import annotations

import time

from mixfed.experiments.probing import probe
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.reproduce.store import Record, columns
from mixfed.experiments.watch import UNWATCHED, Watch


def probed(recipe: Recipe, watch: Watch = UNWATCHED) -> Record:
    """How unlike clients and centre are, in the worst of the recipe's rounds: G̃² and B̃²."""
    began = time.perf_counter()
    found, advice = probe(recipe, recipe.rounds, 1, watch)
    entry: Record = {"round": recipe.rounds, "G2": found.largest("G2"), "B2": found.largest("B2")}
    entry |= {"G2_median": found.typical("G2"), "B2_median": found.typical("B2")}
    return _found(recipe.rounds, began, [entry]) | {"advice": advice.algorithm}


def traced(recipe: Recipe, watch: Watch = UNWATCHED) -> Record:
    """The error at every α of a theory's first setting, measured with the recipe's seed, and in closed form.

    The rounds of the record are the numbers of the values of α. Its metrics are curves, but for those that are the same
    at every α: the error at both ends, the least one and where it is, by what share it is below both ends (``gain``),
    and how far the measured error is from the closed form at most (``apart``).
    """
    from mixfed.experiments.theory import curves, setting_of, values_of_alpha

    began = time.perf_counter()
    alphas = values_of_alpha(recipe.theory)
    watch.begin(f"ρ = {recipe.theory.rho[0]} · seed {recipe.seed}", 1)
    _, closed, measured = curves([setting_of(recipe.theory, recipe.theory.rho[0])], alphas, [recipe.seed])[0]
    errors = [float(value) for value in measured[0]]
    least = min(errors)
    whole = {"loss_global": errors[0], "loss_local": errors[-1], "loss_best": least}
    whole |= {"best_alpha": alphas[errors.index(least)], "gain": 1 - least / min(errors[0], errors[-1])}
    whole |= {"apart": max(abs(error / float(c) - 1) for error, c in zip(errors, closed, strict=True))}
    entries = [
        {"round": i, "alpha": a, "loss": errors[i], "closed": float(closed[i])} | whole for i, a in enumerate(alphas)
    ]
    return _found(0, began, entries)


def _found(rounds: int, began: float, entries: list[Record]) -> Record:
    seconds = round(time.perf_counter() - began, 3)
    return {"executor": "auto", "metrics": columns(entries), "rounds": rounds, "seconds": seconds, "ledger": {}}
