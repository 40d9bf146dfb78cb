"""An experiment run in its folder: everything that it finds is written down, and a run that stopped goes on."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mixfed.backends.distributed.ranks import LostRank, Ranks
from mixfed.core.checkpoint import Checkpoints, save_params, warn
from mixfed.core.files import write_atomically
from mixfed.core.loop import Callback, Record, Result
from mixfed.core.stopping import best_round
from mixfed.errors import InputError, RunStopped
from mixfed.experiments import scores
from mixfed.experiments.build import Experiment, build_stopping, cores_of
from mixfed.experiments.facts import facts_of
from mixfed.experiments.folder import RunFolder, clean, identity
from mixfed.experiments.inputs import fingerprints, require_same_inputs
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.schema import Table


def run_in_folder(
    experiment: Experiment,
    folder: RunFolder,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] | None = None,
    written: Table | None = None,
    page: bool = True,
    ranks: Ranks | None = None,
) -> Result:
    """Runs (or goes on) and writes everything down; an interrupted run has its checkpoint and no result.

    ``written`` is what the user's recipe says for this algorithm, without settings of the command line: a resumed run
    then notices where it was edited. A resumed run simulates as it did before. Without ``page`` it has no report of its
    own, for runs that are shown together with others. With ``ranks`` this is what rank 0 does.
    """
    with folder.locked():
        if resume:
            stored = folder.stored()
            require_same_inputs(replace(experiment.recipe, inputs=stored.inputs), f"the run in {folder.path} began")
            recipe = replace(experiment.recipe, simulator=stored.simulator, inputs=stored.inputs)
        else:
            folder.require_unused()
            require_same_inputs(experiment.recipe, "the run that it repeats")
            how = experiment.recipe.simulator
            how = replace(how, cores=cores_of(how))
            recipe = replace(experiment.recipe, simulator=how, inputs=fingerprints(experiment.recipe))
            folder.write_config(recipe, written)
            if experiment.scenario.source.encoding is not None:
                write_atomically(folder.data, (json.dumps(experiment.scenario.learnt(), indent=2) + "\n").encode())
        experiment = replace(experiment, recipe=recipe)

        def chose(source: str, execution: str) -> None:
            how = folder.stored().simulator
            if how.chosen.get(source) != execution:
                chosen = replace(how, chosen=how.chosen | {source: execution})
                folder.write_config(replace(recipe, simulator=chosen))

        checkpoints = Checkpoints(
            folder.checkpoints, recipe.checkpoint.every, identity=identity(recipe), say=say or warn
        )
        folder.write_history(*_done(checkpoints, recipe) if resume else ([], []))
        try:
            result = experiment.run(
                callbacks=[folder.append, *([_keep_best(folder, recipe)] if recipe.stop.metric else []), *callbacks],
                checkpoints=checkpoints,
                resume=resume,
                should_stop=should_stop,
                say=say or (lambda sentence: None),
                chose=chose,
                ranks=ranks,
            )
        except LostRank:  # the run itself can go on
            raise
        except RunStopped as error:
            folder.note_stop(str(error))
            raise
        except InputError:
            if not resume and not folder.checkpoints.exists():
                folder.forget()
            raise
        if result.finished:
            _write_result(folder, replace(experiment, recipe=folder.stored()), result, page)
    return result


def run_beside(
    experiment: Experiment, checkpoints: Path, ranks: Ranks, *, resume: bool, should_stop: Callable[[], bool]
) -> Result:
    """What the other ranks do while rank 0 is in :func:`run_in_folder`: the same, but for writing."""
    kept = Checkpoints(checkpoints, experiment.recipe.checkpoint.every)
    result = experiment.run(checkpoints=kept, resume=resume, should_stop=should_stop, ranks=ranks)
    if result.finished:
        facts_of(experiment, result)
    return result


def _keep_best(folder: RunFolder, recipe: Recipe) -> Callback:
    """A callback that writes the parameters down whenever the metric of [stop] is better than ever before."""
    rule = build_stopping(recipe)

    def keep(record: Record) -> None:
        if record.metrics and best_round(record.history, rule.metric, rule.smaller_is_better) == record.round:
            save_params(folder.best, record.params)

    return keep


def _done(checkpoints: Checkpoints, recipe: Recipe) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The history and the diagnostics of the checkpoint that the run goes on from."""
    saved = checkpoints.resume(seed=recipe.seed, rounds=recipe.rounds, every=recipe.evaluate.every)
    return (saved["history"], saved["diagnostics"]) if saved else ([], [])


def _write_result(folder: RunFolder, experiment: Experiment, result: Result, page: bool) -> None:
    from mixfed.experiments.report.page import write_report  # no run waits for these to begin
    from mixfed.experiments.report.plot import plot_diagnostics, plot_run
    from mixfed.experiments.report.view import View
    from mixfed.experiments.reporting import repeat_command

    recipe = experiment.recipe
    folder.write_history(result.history, result.diagnostics)
    save_params(folder.model, result.params)
    plot_run(folder.plot, f"{recipe.name}: {recipe.algorithm}", folder.history())
    if result.diagnostics:
        plot_diagnostics(folder.diagnostics_plot, f"{recipe.name}: {recipe.algorithm}", folder.diagnosed())
    found = result_json(result, recipe.evaluate.best_of_last) | {"simulation": _simulation(recipe)}
    if recipe.stop.metric:
        rule = build_stopping(recipe)
        best = best_round(result.history, rule.metric, rule.smaller_is_better)
        found["best"] = next((clean(entry) for entry in result.history if entry["round"] == best), None)
    facts = clean(facts_of(experiment, result) | {"costs": result.costs, "jobs": result.jobs})
    write_atomically(folder.facts, (json.dumps(facts) + "\n").encode())
    if page:
        view = View(recipe, folder.path, found, folder.history(), result.costs, folder.diagnosed(), facts)
        write_report(folder.report, [view], repeat_command(folder))
    write_atomically(folder.result, (json.dumps(found, indent=2) + "\n").encode())


def result_json(result: Result, best_of_last: int = 1) -> dict[str, Any]:
    """What result.json holds: each metric as last evaluated, or the best of so many last evaluations."""
    figures = {name: scores.best_of_last(result.history, name, best_of_last) for name in result.metrics}
    return {
        "metrics": clean(figures),
        "ledger": result.ledger,
        "rounds": result.rounds,
        "seconds": round(result.seconds, 3),
        "seed": result.seed,
        "warnings": result.warnings,
        **({"broken": result.broken} if result.broken else {}),
        **({"ended": result.ended} if result.ended else {}),
        "faults": [asdict(fault) for fault in result.faults],
        "versions": versions(),
    }


def _simulation(recipe: Recipe) -> dict[str, Any]:
    """What decides the last bits of a run's numbers, beside the recipe and the versions."""
    how = recipe.simulator
    executions = how.chosen if how.executor == "auto" else {"": how.executor}
    return {"backend": recipe.backend, "cores": how.cores, "threads": how.threads, "executions": executions}


def versions() -> dict[str, str]:
    """What a result depends on beside the recipe."""
    return {"python": platform.python_version()} | {name: version(name) for name in ("mixfed", "torch", "numpy")}
