"""From trials to advice: two or three methods with settings, why, what each costs, and what was ruled out."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mixfed.algorithms.registry import ALGORITHMS
from mixfed.errors import InputError, RunStopped
from mixfed.evaluate.probe.advice import LARGE
from mixfed.experiments.advise.look import Look, look_at, with_validation
from mixfed.experiments.advise.trials import STEPS, Field, Trial, first_rounds
from mixfed.experiments.probing import predict
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.tables import amount, figure
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.scores import metric_names, require_metric
from mixfed.experiments.watch import Interrupted, Watch

LATE = ("fedasync", "fedbuff", "ca2fl")
PERSONAL = ("local", "mtl", "lg_fedavg")
GUIDED = ("feddle", "feddf")
MIXED = ("parallel", "example_transfer", "gradient_1way", "gradient_2way")
AT_CENTRE = ("transfer", *MIXED, "fed_ft", "hfcl", "feddle_plus")
ADVISED = 3
"""So many methods are advised at most."""
KEPT = 5
"""So many methods are tried to the end, and so many trials with other seeds."""
MOST_SEEDS = 20
CLOSE = 0.05
"""A method is advised beside the best if its figure differs by no more than this share."""
NOTES = {
    "gradient_1way": "It repeats one central gradient K times a round, so that it is among the first to diverge when"
    " rates grow.",
    "gradient_2way": "Its steps are about twice as long as parallel training's, so do not raise its rates.",
}
_PREFERRED = ("accuracy", "auc", "recall@10", "recall@5", "recall@1")


@dataclass(frozen=True)
class Advice:
    """``advice`` has the best method first, each with settings and why; ``ruled_out`` has a reason for each other.

    ``look`` is what was seen of the data, ``trials`` a row for each trial.
    """

    advice: list[dict[str, Any]]
    ruled_out: dict[str, str]
    look: list[str]
    trials: list[dict[str, Any]]
    metric: str

    def json(self) -> dict[str, Any]:
        """What the command ends with."""
        return {"advice": self.advice, "ruled_out": self.ruled_out}

    def __repr__(self) -> str:
        best = [f"{n + 1}. {entry['why']}" for n, entry in enumerate(self.advice)]
        return "\n".join([*self.look, *best, *(f"Not {name}: {why}" for name, why in self.ruled_out.items())])


def advise(
    request: Request,
    minutes: float = 5,
    metric: str | None = None,
    told: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Advice:
    """Looks at who holds what, tries the methods that may work on validation data, and advises.

    Test examples are never looked at. ``clock`` counts the seconds: ``time.process_time`` gives the same advice on a
    busy machine as on a free one.
    """
    if not minutes > 0:
        raise InputError(f"Advice takes some minutes, not {minutes:g}.")
    until = clock() + 60 * minutes
    base = request.base()
    recipe = request.on(base)
    metric = metric or _metric(recipe)
    require_metric(recipe, metric)
    scenario = build_scenario(recipe)
    look = look_at(recipe, scenario)
    ruled_out = _ruled_out(recipe, look, metric)
    seen = [*look.words(), *_probed(recipe, look, until, clock)]
    names = [name for name, entry in ALGORITHMS.items() if not entry.oracle and name not in ruled_out]
    with tempfile.TemporaryDirectory() as folder:
        field = Field(partial(with_validation, scenario), metric, until, Path(folder), told, clock)
        trials = [Trial(_tried(request, base, name, metric), {}) for name in names]
        per_round = _pilot(field, trials)
        first = first_rounds(per_round, len(trials), recipe.rounds, field.left())
        best = field.halve(trials, first, recipe.rounds, KEPT, PERSONAL)
        if not best:
            raise RunStopped(
                "No method could be tried to an end in this time; give it more minutes or lower the rates."
            )
        varied = _varied(field, request, base, best[:ADVISED], metric)
        ranked = _repeated(field, [*best, *varied])
    every, advised = [*trials, *varied], _one_each(ranked, metric)
    kept = {trial.algorithm for trial in advised}
    ruled_out |= _left_behind([trial for trial in trials if trial.algorithm not in kept], best[0], metric)
    return Advice(
        [_advice(trial, ranked[0], recipe.rounds, metric) for trial in advised],
        ruled_out,
        seen,
        [_row(trial, metric) for trial in sorted(every, key=lambda t: -t.rounds)],
        metric,
    )


def _probed(recipe: Recipe, look: Look, until: float, clock: Callable[[], float]) -> list[str]:
    """What a short probe says of the gradients of clients and centre, if it ends in a tenth of the time."""
    if not look.central or look.other_domain:
        return []
    stop = clock() + (until - clock()) / 10
    try:
        found = predict(recipe, Watch(should_stop=lambda: clock() > stop))
    except (Interrupted, InputError, RunStopped):
        return []
    unlike = found["max"]["G2"] >= LARGE
    told = "unlike, so that the gradient transfers may be ahead of parallel training" if unlike else "alike"
    return [f"The gradients of clients and centre are {told} (G̃² = {found['max']['G2']:.3g})."]


def _metric(recipe: Recipe) -> str:
    """The figure that matters most among those of a recipe: the first of its sets, by a metric that people read."""
    names = metric_names(recipe)
    plain = [n for n in names if n in recipe.evaluate.metrics] or names
    for wanted in _PREFERRED:
        found = [name for name in plain if name == wanted or name.startswith(f"{wanted}_")]
        if found:
            return found[0]
    return names[0]


def _tried(request: Request, base: Mapping[str, Any], name: str, metric: str, **settings: Any) -> Recipe:
    """The recipe of a trial: judged on validation data by the one figure, a few times on the way."""
    recipe = request.on(dict(base), algorithm=name, **settings)
    plain = next(m for m in sorted(recipe.evaluate.metrics, key=len, reverse=True) if metric.startswith(m))
    part = metric.removeprefix(plain).removeprefix("_") or "all"
    every = max(recipe.rounds // STEPS, 1)
    how = replace(recipe.evaluate, on="validation", every=every, metrics=[plain], sets=[part], best_of_last=1)
    return replace(recipe, evaluate=how, checkpoint=replace(recipe.checkpoint, every=recipe.rounds))


def _ruled_out(recipe: Recipe, look: Look, metric: str) -> dict[str, str]:
    """Methods that need no trial."""
    found: dict[str, str] = {}
    if not look.central and recipe.regulariser.name == "none":
        found |= dict.fromkeys(("center", *AT_CENTRE, *GUIDED), "the centre holds no data")
    if look.other_domain:
        found |= dict.fromkeys(("center", *AT_CENTRE), "the centre's labels are not the task's")
    common = not metric.endswith(("_local", "_old", "_joined", "_new", "_averaged"))
    if common:
        found |= dict.fromkeys(PERSONAL, "it makes a model for each client, and one for all is asked for")
    if not look.late:
        found |= dict.fromkeys(LATE, "it is made for late clients, and nobody is late")
    asked = common and not metric.endswith("_clients")
    if look.only_centre and asked:
        labels = ", ".join(map(str, look.only_centre[:10]))
        clients = [name for name in ALGORITHMS if name not in (*AT_CENTRE, *GUIDED, "center")]
        found |= dict.fromkeys(clients, f"it never sees the labels {labels}, which only the centre has") | found
        guided = f"it puts together what clients have learnt, and the labels {labels} only the centre has"
        found |= dict.fromkeys(GUIDED, guided)
    if look.only_clients and not metric.endswith("_centre"):
        labels = ", ".join(map(str, look.only_clients[:10]))
        found |= {"center": f"it never sees the labels {labels}, which only clients have"} | found
    return {name: why for name, why in found.items() if name in ALGORITHMS and not ALGORITHMS[name].oracle}


def _pilot(field: Field, trials: list[Trial]) -> float:
    """The seconds of a round, from the first method that can be built."""
    for trial in trials:
        every = trial.recipe.evaluate.every
        field.told(f"{trial.algorithm}: how long a round takes")
        field.go_on(trial, every, field.left() / 10)
        if trial.rounds:
            return trial.seconds / trial.rounds
    return 1.0


def _varied(field: Field, request: Request, base: Mapping[str, Any], best: list[Trial], metric: str) -> list[Trial]:
    """The best methods at half and at double of the user's rates, and the best one at half and double of K."""
    found: list[Trial] = []
    for trial in best:
        for factor in (0.5, 2.0):
            found.append(Trial(*_at_rate(request, base, trial, metric, factor)))
    key = "client.steps" if best[0].recipe.client.steps else "client.epochs"
    local = best[0].recipe.client.steps or best[0].recipe.client.epochs
    for value in (local // 2, 2 * local):
        if value and best[0].algorithm != "center":
            settings = {key: value}
            found.append(Trial(_tried(request, base, best[0].algorithm, metric, **settings), settings))
    tried: list[Trial] = []
    for trial in found:
        like = next(b for b in best if b.algorithm == trial.algorithm)
        if field.left() < 1.2 * like.seconds:
            break
        field.told(f"{trial.algorithm} with {_told(trial.settings)}")
        field.go_on(trial, like.rounds, 2 * max(like.seconds, 1.0))
        tried.append(trial)
    return tried


def _at_rate(
    request: Request, base: Mapping[str, Any], trial: Trial, metric: str, factor: float
) -> tuple[Recipe, dict[str, Any]]:
    recipe = trial.recipe
    settings: dict[str, Any] = {"client.learning_rate": float(f"{factor * recipe.client.learning_rate:.3g}")}
    if trial.algorithm in (*AT_CENTRE, "center"):
        settings["central.learning_rate"] = float(f"{factor * recipe.central.learning_rate:.3g}")
    if trial.algorithm == "center":
        del settings["client.learning_rate"]
    return _tried(request, base, trial.algorithm, metric, **settings), settings


def _repeated(field: Field, trials: list[Trial]) -> list[Trial]:
    """The trials best first, after the best few were repeated with other seeds as long as there is time."""
    for number in range(1, MOST_SEEDS):
        for trial in field.ranked(trials)[:KEPT]:
            if field.left() > 1.2 * trial.seconds and len(trial.others) < number:
                field.told(f"{trial.algorithm} {_told(trial.settings)} with another seed")
                field.again(trial, trial.recipe.seed + number)
    ranked = field.ranked(trials)
    most = max((len(trial.others) for trial in ranked), default=0)
    sure = [trial for trial in ranked if len(trial.others) >= min(most, 1)]
    return [*sure, *(trial for trial in ranked if trial not in sure)]


def _one_each(ranked: list[Trial], metric: str) -> list[Trial]:
    """The best trial of each method that comes close to the best of all."""
    found: dict[str, Trial] = {}
    best = ranked[0].score(metric)
    for trial in ranked:
        if abs(trial.score(metric) - best) <= CLOSE * abs(best):
            found.setdefault(trial.algorithm, trial)
    return list(found.values())[:ADVISED]


def _left_behind(trials: list[Trial], best: Trial, metric: str) -> dict[str, str]:
    """Why methods that were tried are not advised."""
    found = {}
    for trial in trials:
        if trial.why_not or not trial.scores:
            found[trial.algorithm] = trial.why_not or "there was no time to try it"
        else:
            found[trial.algorithm] = (
                f"{metric} {figure(trial.score(metric))} on validation data after {trial.rounds} rounds, where"
                f" {best.algorithm} had {figure(best.score(metric, trial.rounds))}"
            )
    return found


def _advice(trial: Trial, best: Trial, rounds: int, metric: str) -> dict[str, Any]:
    seeds = 1 + len(trial.others)
    per_round = trial.sent / max(trial.rounds, 1)
    told = f" with {_told(trial.settings)}" if trial.settings else " with the settings of the recipe"
    first = "Best" if trial is best else "Also good"
    why = (
        f"{first}: {trial.algorithm}{told}, {metric} {figure(trial.score(metric))} on validation data after"
        f" {trial.rounds} of {rounds} rounds ({seeds} seed{'s' if seeds > 1 else ''}); a whole run sends"
        f" {amount('bytes', per_round * rounds)} and takes about {_time(trial.seconds / max(trial.rounds, 1) * rounds)}"
        " here."
    )
    note = NOTES.get(trial.algorithm)
    return {"algorithm": trial.algorithm, "settings": trial.settings, "why": f"{why} {note}" if note else why}


def _row(trial: Trial, metric: str) -> dict[str, Any]:
    return {
        "algorithm": trial.algorithm,
        "settings": trial.settings,
        "rounds": trial.rounds,
        metric: trial.score(metric) if trial.scores and not trial.why_not else None,
        "seeds": 1 + len(trial.others),
        "bytes": trial.sent,
        "seconds": round(trial.seconds, 2),
    }


def _told(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value:g}" for key, value in settings.items())


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
