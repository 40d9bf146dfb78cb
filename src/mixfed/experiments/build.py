"""From a recipe to something that runs: its data, model, trainers, algorithm and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from mixfed.algorithms.makers import Setup
from mixfed.algorithms.registry import ALGORITHMS, base_of
from mixfed.backends.distributed.engine import Distributed
from mixfed.backends.distributed.ranks import Ranks
from mixfed.backends.loopback import Loopback
from mixfed.backends.run import run
from mixfed.backends.runtime import Measure
from mixfed.backends.simulator.cores import in_operators
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.algorithm import CENTRE, VALIDATION, Algorithm
from mixfed.core.backend import Backend
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.loop import Callback, Evaluate, Result
from mixfed.core.model import Loss, Model
from mixfed.core.regularisers import spreadout_of
from mixfed.core.stopping import Stopping
from mixfed.core.train import LocalTrainer, weighted
from mixfed.data.scenario import Scenario
from mixfed.data.store import CentralData, FederatedData, spread
from mixfed.errors import InputError
from mixfed.evaluate.metrics import Metric, evaluator, measure, metric_sums, name_of
from mixfed.evaluate.personal import averaged_test, combined, local_test, new_test
from mixfed.evaluate.spread import spread_test
from mixfed.experiments import own
from mixfed.experiments.auxiliary import adversary_tests, against_adversary
from mixfed.experiments.beforehand import build_schedule, check_own_set, no_part, require_length
from mixfed.experiments.limits import require_room_for_batches
from mixfed.experiments.methods import find_algorithm
from mixfed.experiments.networks import build_model
from mixfed.experiments.own import short
from mixfed.experiments.recipe import LOCAL_PERCENTILES, Recipe, SimulatorSection, StopSection, Training, optimizer_of
from mixfed.experiments.scenario import build_scenario
from mixfed.experiments.schema import is_own
from mixfed.experiments.scores import small_is_good
from mixfed.transforms.bound import bounded
from mixfed.transforms.memory import keep_memory
from mixfed.transforms.rows.exchange import exchange_rows


@dataclass(frozen=True)
class Experiment:
    """A recipe made concrete."""

    recipe: Recipe
    scenario: Scenario
    algorithm: Algorithm
    clients: FederatedData
    evaluate: Evaluate
    remote: Backend | None = None
    """Where the clients are, if they are not simulated here."""

    def run(
        self,
        *,
        callbacks: Sequence[Callback] = (),
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda sentence: None,
        chose: Callable[[str, str], None] = lambda source, execution: None,
        ranks: Ranks | None = None,
    ) -> Result:
        """Trains as the recipe says; ``chose`` is told which execution was chosen for a source.

        With ``ranks`` all of them call this, and simulate as rank 0 does.
        """
        how = ranks.of(0, self.recipe.simulator) if ranks else self.recipe.simulator
        recipe = replace(self.recipe, simulator=how)
        rules = [build_stopping(recipe)] if recipe.stop != StopSection() else []
        held = {CENTRE: self.scenario.central, VALIDATION: self.scenario.validation}
        with in_operators(cores_of(how)):
            return run(
                self.algorithm,
                self.clients,
                rounds=recipe.rounds,
                schedule=build_schedule(recipe),
                central={n: d for n, d in held.items() if d is not None},
                seed=recipe.seed,
                evaluate=self.evaluate,
                every=recipe.evaluate.every,
                backend=self._backend(how, checkpoints, say, chose, ranks),
                callbacks=[*callbacks, *rules],
                checkpoints=checkpoints,
                resume=resume,
                should_stop=should_stop,
            )

    def _backend(
        self,
        how: SimulatorSection,
        checkpoints: Checkpoints | None,
        say: Callable[[str], None],
        chose: Callable[[str, str], None],
        ranks: Ranks | None,
    ) -> Backend:
        if ranks and self.recipe.backend != "simulator":
            raise InputError(f"The backend {self.recipe.backend} works in one process; leave out torchrun.")
        if self.recipe.backend == "flower":
            if self.remote is None:
                raise InputError("A federation is started by 'mixfed flower local' or 'flwr run', not by 'mixfed run'.")
            return self.remote
        if self.recipe.backend == "loopback":
            return Loopback(self.scenario.own, measure_of(self.recipe))
        if how.private == "disk" and checkpoints is None:
            raise InputError("Private parts on disk live beside the checkpoints, and this run writes none.")
        make = partial(Distributed, ranks) if ranks else Simulator
        return make(
            how.executor,
            threads=how.threads or None,
            chunk=how.chunk or None,
            memory=how.memory,
            in_flight=how.in_flight,
            deterministic_sum=how.deterministic_sum,
            private_folder=checkpoints.folder / "private" if checkpoints and how.private == "disk" else None,
            chosen=how.chosen,
            chose=chose,
            say=say,
        )


def measure_of(recipe: Recipe) -> Measure:
    """How a device evaluates: with the recipe's metrics, also those of the user's own."""
    metrics = {name_of(m): m for m in build_metrics(recipe) if not isinstance(m, str)}
    return partial(metric_sums, own=metrics)


def cores_of(how: SimulatorSection) -> int:
    """How many cores an operator may use. A deterministic sum has one, for others round differently."""
    return how.cores or (1 if how.deterministic_sum else torch.get_num_threads())


def build(recipe: Recipe, scenario: Scenario | None = None) -> Experiment:
    """The experiment of a recipe; a scenario that was built before for the same data and seed can be given."""
    scenario = scenario or build_scenario(recipe)
    algorithm, clients = build_algorithm(recipe, scenario)
    return Experiment(recipe, scenario, algorithm, clients, _evaluation(recipe, scenario, algorithm))


def build_algorithm(recipe: Recipe, scenario: Scenario) -> tuple[Algorithm, FederatedData]:
    """The algorithm of a recipe, and the clients that it trains on: all that a site of a federation needs."""
    require_room_for_batches(recipe, scenario)
    model = build_model(recipe, scenario)
    entry = find_algorithm(recipe.algorithm, {"methods": recipe.methods, "home": recipe.home})
    mixes = _mixes(recipe)
    setup = build_setup(recipe, scenario, model)
    algorithm = entry.make(setup, **recipe.algorithm_options())
    if recipe.client.keep_memory and algorithm.batching:
        algorithm = keep_memory(algorithm, setup.client)
    on_clients = recipe.regulariser.name != "none" and not mixes
    if recipe.rows.exchange and algorithm.batching and not on_clients:
        algorithm = exchange_rows(algorithm, by_touch=recipe.rows.by_touch)
    elif recipe.rows.by_touch:
        why = "they need whole tables for the regulariser" if recipe.rows.exchange else "rows.exchange is false"
        raise InputError(
            f"rows.by_touch is for clients that exchange rows, and those of {recipe.algorithm} do not: {why}."
        )
    if recipe.client.bound and algorithm.batching:
        algorithm = bounded(algorithm, recipe.client.bound)
    clients = scenario.clients
    if entry.oracle and scenario.central is not None:
        clients = spread(scenario.central, clients, recipe.seed)
    return algorithm, clients


def build_stopping(recipe: Recipe) -> Stopping:
    """When the run ends before its last round."""
    how = recipe.stop
    metric = f"{short(how.metric)}_validation" if how.metric else ""
    return Stopping(metric, how.patience, small_is_good(metric), how.minutes, how.bytes)


def build_setup(recipe: Recipe, scenario: Scenario, model: Model) -> Setup:
    """What every algorithm of the recipe is made from."""
    client, centre = _trainer(recipe.client, model, "client"), None
    if scenario.central is not None and (recipe.regulariser.name == "none" or recipe.regulariser.with_data):
        centre = _trainer(recipe.central, model, "central")
    regulariser = _regulariser(recipe, model)
    if regulariser is not None and not _mixes(recipe):
        theirs, common = weighted(model.loss, recipe.mixing.w_f), weighted(regulariser, recipe.mixing.w_c)
        client = replace(client, loss=lambda params, batch: theirs(params, batch) + common(params, batch))
        regulariser = None
    without_centre = {} if scenario.central is None or centre else {"without_centre": _ONLY_REGULARISES}
    return Setup(
        client=against_adversary(recipe, client),
        server=optimizer_of(recipe.server),
        rounds=recipe.rounds,
        centre=centre,
        regulariser=replace(_trainer(recipe.central, model, "central"), loss=regulariser) if regulariser else None,
        merge=optimizer_of(recipe.merge),
        weights=(recipe.mixing.w_f, recipe.mixing.w_c),
        options=recipe.algorithms,
        **without_centre,
        of_other_domain=recipe.data.central.kind == "other",
    )


_ONLY_REGULARISES = "the centre has some but is to minimise the regulariser only; set regulariser.with_data=true"


def _mixes(recipe: Recipe) -> bool:
    """Whether the algorithm, or the one that it is built on, minimises a regulariser at the centre."""
    name = recipe.algorithm
    if name in recipe.methods:
        return False
    entry = base_of(recipe.algorithm_options().get("base", "fedavg")) if name == "lg_fedavg" else ALGORITHMS[name]
    return entry.mixes


def _regulariser(recipe: Recipe, model: Model) -> Loss | None:
    section = recipe.regulariser
    if section.name == "none":
        return None
    if not model.tables:
        raise InputError(
            f"The network '{recipe.model.name}' has no table of embeddings whose spreadout could be taken."
        )
    return spreadout_of(next(iter(model.tables)), section.scale, by_pairs=section.by_pairs)


def _trainer(section: Training, model: Model, name: str) -> LocalTrainer:
    require_length(section, name)
    batching = Batching(section.batch_size, section.steps or None, section.epochs or None, section.shuffle)
    return LocalTrainer(model, optimizer_of(section), batching, section.clip or None)


def _evaluation(recipe: Recipe, scenario: Scenario, algorithm: Algorithm) -> Evaluate:
    """The metrics on every set that the recipe names."""
    _refuse_in_one_place(recipe, algorithm)
    on, metrics, sets = recipe.evaluate.on, build_metrics(recipe), recipe.evaluate.sets
    functions = [metric for metric in metrics if not isinstance(metric, str)]
    if functions:  # one that cannot work fails here, and not after the first rounds
        measure(algorithm.model, algorithm.model.initial(), scenario.test.select([0]), functions)
    if {"parity_gap", "odds_gap"} & set(recipe.evaluate.metrics) and "protected" not in scenario.test.arrays:
        raise InputError("Fairness gaps are between groups of protected attributes; name them in data.protected.")
    parts = {"" if n == "all" else n: _part(on, scenario, n) for n in sets if n in ("all", "clients", "centre")}
    found: list[Evaluate] = [evaluator(algorithm.model, parts, metrics, personal=algorithm.personal)] if parts else []
    if recipe.stop.metric:
        unseen = {"validation": _part("validation", scenario, "all")}
        by = build_metrics(recipe, [recipe.stop.metric])
        found.append(evaluator(algorithm.model, unseen, by, personal=algorithm.personal))
    last = len(scenario.clients) - 1
    for name, clients in (("local", None), ("old", np.arange(last)), ("joined", [last])):
        if name in sets:
            theirs = _own(recipe, scenario, name)
            if not theirs.sizes(clients).any():
                raise InputError(
                    f"No client of the evaluation set '{name}' has {on} examples of its own; raise their share,"
                    f" data.own_{on}."
                )
            found.append(local_test(algorithm, theirs, metrics, clients=clients, name=name, on=on))
    percentiles = {name: p for name, p in LOCAL_PERCENTILES.items() if name in sets}
    if percentiles:
        found.append(spread_test(algorithm, _own(recipe, scenario, "local"), metrics, percentiles))
    for name, test in (("new", new_test), ("averaged", averaged_test)):
        if name in sets:
            found.append(test(algorithm, _part(on, scenario, "all"), metrics))
    if "adversary" in sets or "postfit" in sets:
        found += adversary_tests(recipe, scenario, algorithm, _own(recipe, scenario, "local"))
    return combined(*found)


def build_metrics(recipe: Recipe, names: Sequence[str] | None = None) -> list[str | Metric]:
    """The metrics of a recipe, or these: names, and functions of the user's own."""
    names = recipe.evaluate.metrics if names is None else names
    return [own.load_function(n, recipe.home, "evaluate.metrics") if is_own(n) else n for n in names]


def _part(on: str, scenario: Scenario, name: str) -> CentralData:
    """The evaluation set of that name, or the setting that it wants."""
    there = {"test": scenario.test, "validation": scenario.validation, "centre": scenario.of_centre}
    if there[on] is None:
        raise no_part(on)
    if name == "all":
        return scenario.part(on, name)
    like_clients = scenario.like_clients.get(on)
    if like_clients is None:
        raise InputError(
            f"Clients and centre do not hold different kinds of examples, so there is no evaluation set '{name}';"
            " leave it out of evaluate.sets."
        )
    if not (like_clients if name == "clients" else ~like_clients).any():
        raise InputError(f"No {on} example is like those of the {name}; leave '{name}' out of evaluate.sets.")
    return scenario.part(on, name)


def _refuse_in_one_place(recipe: Recipe, algorithm: Algorithm) -> None:
    """Refuses evaluations that look into all clients' own models, where these stay on their devices."""
    apart = [name for name in recipe.evaluate.sets if name not in ("local", "old", "joined")]
    if recipe.backend != "simulator" and algorithm.personal is not None and apart:
        raise InputError(
            f"With the backend {recipe.backend} the clients' own models of {recipe.algorithm} stay on their devices, so"
            f" the set '{apart[0]}' cannot be evaluated; set evaluate.sets to ['local'] (and data.own_test above 0)."
        )


def _own(recipe: Recipe, scenario: Scenario, name: str) -> FederatedData:
    check_own_set(recipe, name, there=recipe.evaluate.on in scenario.own)
    return scenario.own[recipe.evaluate.on]
