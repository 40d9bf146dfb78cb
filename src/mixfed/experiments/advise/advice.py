"""From trials to advice: two or three methods with settings, why, what each costs, and what was ruled out."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import variance
from typing import Any

from mixfed.algorithms.registry import ALGORITHMS
from mixfed.errors import InputError, RunStopped
from mixfed.evaluate.probe.advice import LARGE
from mixfed.experiments import own
from mixfed.experiments.advise.learning import nothing_learnt
from mixfed.experiments.advise.look import Look, look_at, with_validation
from mixfed.experiments.advise.trials import PATIENCE, STEPS, TRYING, Field, Trial, affordable_rounds, rounds_told
from mixfed.experiments.build import build
from mixfed.experiments.probing import predict
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.report.tables import amount, figure
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.scores import metric_names, require_metric
from mixfed.experiments.watch import Interrupted, Watch

LATE = ("fedasync", "fedbuff")
"""Methods that late clients alone are a reason for. CA2FL is not: it also evens out who is asked in a round."""
PERSONAL = ("local", "mtl", "lg_fedavg")
GUIDED = ("feddle", "feddf")
MIXED = ("parallel", "example_transfer", "gradient_1way", "gradient_2way")
AT_CENTRE = ("transfer", *MIXED, "fed_ft", "hfcl", "feddle_plus")
ADVISED = 3
"""So many methods are advised at most."""
KEPT = 5
"""So many trials are repeated with other seeds."""
MOST_SEEDS = 10
CLOSE = 0.05
"""A method is advised beside the best if its figure differs by no more than this share."""
NOTES = {
    "gradient_1way": "It repeats one central gradient K times a round, so that it is among the first to diverge when"
    " rates grow.",
    "gradient_2way": "Its steps are about twice as long as parallel training's, so do not raise its rates.",
}
NONE: Mapping[str, Any] = {}
_PREFERRED = ("accuracy", "auc", "recall@10", "recall@5", "recall@1")


@dataclass(frozen=True)
class Advice:
    """``advice`` has the best method first, each with settings and why; ``ruled_out`` has a reason for each other.

    ``look`` is what was seen of the data, ``trials`` a row for each trial, ``time`` says whether there was enough, and
    ``minutes`` how many would do for all methods. ``warning`` is a sentence if no method has learnt anything.
    """

    advice: list[dict[str, Any]]
    ruled_out: dict[str, str]
    look: list[str]
    trials: list[dict[str, Any]]
    metric: str
    time: str
    minutes: float
    warning: str = ""

    def json(self) -> dict[str, Any]:
        """What the command ends with."""
        told = {"advice": self.advice, "ruled_out": self.ruled_out}
        return told | {"warning": self.warning} if self.warning else told

    def behind(self) -> dict[str, Any]:
        """What the advice rests on."""
        told = {"look": self.look, "metric": self.metric, "trials": self.trials}
        return told | {"time": self.time, "minutes": self.minutes}

    def __repr__(self) -> str:
        best = [f"{n + 1}. {entry['why']}" for n, entry in enumerate(self.advice)]
        not_these = [f"Not {name}: {why}" for name, why in self.ruled_out.items()]
        warning = [self.warning] if self.warning else []
        return "\n".join([*self.look, *warning, *best, *not_these, self.time])


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
        field = Field(partial(with_validation, scenario), metric, until, Path(folder), told, clock, _in_phases(recipe))
        tried = partial(_tried, request, base, metric)
        every = max(recipe.rounds // STEPS, 1)
        pilots = sorted(names, key=lambda name: name in _in_phases(recipe))
        per_round = _pilot(field, [Trial(tried(every, name), {}) for name in pilots])
        every = min(every, affordable_rounds(per_round, len(names), field.left()))
        trials = [Trial(tried(every, name), {}) for name in names]
        best = field.compete(trials, every, recipe.rounds, PERSONAL)
        if not best:
            raise RunStopped(_untried(trials))
        varied = _varied(field, partial(tried, every), best)
        ranked = _repeated(field, [*best, *varied])
    others = sorted((trial for trial in [*trials, *varied] if trial not in ranked), key=lambda trial: -trial.rounds)
    advised = _one_each(ranked, metric)
    kept = {trial.algorithm for trial in advised}
    ruled_out |= _left_behind([trial for trial in trials if trial.algorithm not in kept], ranked[0], field)
    plain = build(tried(every, "fedavg"), with_validation(scenario, recipe.seed))
    return Advice(
        [_advice(trial, ranked[0], recipe.rounds, metric) for trial in advised],
        ruled_out,
        seen,
        [_row(trial, metric) for trial in [*ranked, *others]],
        metric,
        *_time_told(trials, minutes),
        nothing_learnt(plain, metric, ranked[0].score(metric)),
    )


def _untried(trials: list[Trial]) -> str:
    """Why there is no advice, with what the first method met."""
    met = next((f" {trial.algorithm}: {trial.why_not}" for trial in trials if trial.why_not), "")
    return f"No method could be tried to an end in this time; give it more minutes or lower the rates.{met}"


def _in_phases(recipe: Recipe) -> tuple[str, ...]:
    """Methods whose beginning says little of their end: they train elsewhere, or something else, at first."""
    warm = recipe.algorithms.get("lg_fedavg", {}).get("warm_start", 0)
    return ("transfer", "lg_fedavg") if warm else ("transfer",)


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
    return next(iter([*names, *recipe.evaluate.metrics, "accuracy"]))


def _tried(
    request: Request, base: Mapping[str, Any], metric: str, every: int, name: str, settings: Mapping[str, Any] = NONE
) -> Recipe:
    """The recipe of a trial: judged on validation data by the one figure, after every so many rounds."""
    recipe = request.on(dict(base), algorithm=name, **settings)
    known = sorted(recipe.evaluate.metrics, key=lambda name: -len(own.short(name)))
    plain = next(name for name in known if metric.startswith(own.short(name)))
    part = metric.removeprefix(own.short(plain)).removeprefix("_") or "all"
    metrics = list(dict.fromkeys([plain, "loss"]))
    how = replace(recipe.evaluate, on="validation", every=every, metrics=metrics, sets=[part], best_of_last=1)
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
    if not look.late and not look.joining:
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
    """The seconds of a round and its evaluation, from the first method that can be built."""
    for trial in trials:
        field.told(f"{trial.algorithm}: how long a round takes")
        field.go_on(trial, trial.recipe.evaluate.every, field.left() / 10)
        if trial.rounds:
            return trial.seconds / trial.rounds
    return 1.0


def _varied(field: Field, tried: Callable[..., Recipe], best: list[Trial]) -> list[Trial]:
    """The best methods at half and at double of the user's rates, and the best one at half and double of K.

    So much time is left over that the best few can be repeated, for one lucky run is no reason to change a setting.
    """
    wanted = [(trial, _at_rate(trial, factor)) for trial in best[:ADVISED] for factor in (0.5, 2.0)]
    first = best[0].recipe.client
    key, local = ("client.steps", first.steps) if first.steps else ("client.epochs", first.epochs)
    if best[0].algorithm != "center":
        wanted += [(best[0], {key: value}) for value in (local // 2, 2 * local) if value]
    found: list[Trial] = []
    for like, settings in wanted:
        if field.left() < 1.2 * (like.seconds + sum(trial.seconds for trial in best[:KEPT])):
            break
        field.told(f"{like.algorithm} with {_told(settings)}")
        found.append(Trial(tried(like.algorithm, settings), settings))
        field.go_on(found[-1], like.rounds, PATIENCE * max(like.seconds, 1.0))
    return found


def _at_rate(trial: Trial, factor: float) -> dict[str, Any]:
    """The settings that multiply the rates of what trains in a method."""
    client, central = trial.algorithm != "center", trial.algorithm in (*AT_CENTRE, "center")
    rates = {
        "client.learning_rate": trial.recipe.client.learning_rate if client else None,
        "central.learning_rate": trial.recipe.central.learning_rate if central else None,
    }
    return {key: float(f"{factor * rate:.3g}") for key, rate in rates.items() if rate is not None}


def _repeated(field: Field, trials: list[Trial]) -> list[Trial]:
    """The trials best first, after the best few were repeated with other seeds as long as there is time."""
    most = max(trial.rounds for trial in trials)
    close = field.ranked([trial for trial in trials if trial.rounds == most])[:KEPT]
    for number in range(1, MOST_SEEDS):
        close = [trial for trial in close if not _behind(trial, close[0], field.metric)]
        while close and field.left() < 1.2 * sum(trial.seconds for trial in close):
            close.pop()
        if len(close) < 2:
            break
        for trial in close:
            field.told(f"{trial.algorithm} {_told(trial.settings)} with another seed")
            field.again(trial, trial.recipe.seed + number)
        close = field.ranked(close)
    seeds = max(len(trial.others) for trial in trials)
    return sorted(field.ranked(trials), key=lambda trial: (-trial.rounds, len(trial.others) < seeds / 2))


def _behind(trial: Trial, best: Trial, metric: str) -> bool:
    """Whether other seeds have made it plain that a trial is worse: by more than two standard errors."""
    figures = [[*found.others, found.score(metric, found.rounds)] for found in (trial, best)]
    if min(map(len, figures)) < 3:
        return False
    error = math.sqrt(sum(variance(found) / len(found) for found in figures))
    return abs(trial.score(metric) - best.score(metric)) > 2 * error


def _one_each(ranked: list[Trial], metric: str) -> list[Trial]:
    """The best trial of each method that comes close to the best of all."""
    found: dict[str, Trial] = {}
    best = ranked[0].score(metric)
    for trial in ranked:
        if abs(trial.score(metric) - best) <= CLOSE * abs(best):
            found.setdefault(trial.algorithm, trial)
    return list(found.values())[:ADVISED]


def _left_behind(trials: list[Trial], best: Trial, field: Field) -> dict[str, str]:
    """Why methods that were tried are not advised, each beside what the best had then, on as many seeds."""
    found = {}
    for trial in trials:
        if trial.why_not:
            found[trial.algorithm] = trial.why_not
        elif not field.judged(trial):
            found[trial.algorithm] = f"there was time for {rounds_told(trial.rounds)} of it, and only a whole run tells"
        else:
            found[trial.algorithm] = (
                f"{field.metric} {figure(trial.score(field.metric))} on validation data after"
                f" {rounds_told(trial.rounds)},"
                f" where {best.algorithm} had"
                f" {figure(best.score(field.metric, None if trial.others else trial.rounds))}"
            )
    return found


def _time_told(trials: list[Trial], minutes: float) -> tuple[str, float]:
    """Whether every method was tried to the end, in words, and how many minutes that would take."""
    able = [trial for trial in trials if trial.rounds and not trial.why_not.startswith("it diverged")]
    cut = [trial.algorithm for trial in able if not trial.ended]
    given = "1 minute" if minutes == 1 else f"{minutes:g} minutes"
    if not cut:
        return f"Every method that can work was tried for all rounds in {given}.", minutes
    whole = sum(trial.seconds + trial.cost(trial.recipe.rounds) for trial in able) / TRYING
    enough = max(math.ceil(whole / 60), math.floor(minutes) + 1)
    told = (
        f"In {given} {len(able) - len(cut)} of {len(able)} methods were tried for all rounds; the others were left"
        f" before ({', '.join(cut)}). About {enough} minutes would do for all."
    )
    return told, enough


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
