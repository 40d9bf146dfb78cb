"""The command line. Only what ``--help`` needs is imported here; the rest waits until a command wants it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from mixfed.errors import InputError

app = typer.Typer(
    help="Learn one model from data you hold and data you cannot see: mixed federated learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A packaged recipe (see 'mixfed list') or a .toml.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the recipe; may be repeated.")
]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
Seed = Annotated[int | None, typer.Option(help="Seed of every random draw.")]
DataFolder = Annotated[
    Path | None, typer.Option("--data", help="Folder with the data files (or set MIXFED_DATA).", metavar="DIR")
]
Device = Annotated[str | None, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps …")]
Executor = Annotated[
    Literal["auto", "loop", "vmap"] | None, typer.Option(help="How clients are simulated; auto times the others.")
]


def _folder(text: str) -> Path:
    """A folder; an empty text would be taken for the one that the command is given in."""
    if not text.strip():
        from mixfed.cli import common

        with common.reported():
            raise InputError("--out takes the name of a folder, not an empty text.")
    return Path(text)


Out = Annotated[
    Path | None, typer.Option(parser=_folder, help="Folder to write to; a name under runs/ by default.", metavar="DIR")
]
Tuned = Annotated[Path | None, typer.Option(help="Settings that 'mixfed tune' chose.", metavar="FILE")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")]
Json = Annotated[bool, typer.Option("--json", help="End with the result as one line of JSON.")]


@app.command("list")
def list_command() -> None:
    """Algorithms, recipes and data sources, each with one line."""
    from mixfed.cli import listing

    listing.show()


@app.command("run")
def run_command(
    recipe: RecipeName,
    algorithm: Annotated[str | None, typer.Option(help="An algorithm (see 'mixfed list').")] = None,
    settings: Settings = None,
    rounds: Rounds = None,
    seed: Seed = None,
    data: DataFolder = None,
    device: Device = None,
    executor: Executor = None,
    tuned: Tuned = None,
    out: Out = None,
    resume: Resume = False,
    track: Annotated[
        Literal["tensorboard", "mlflow"] | None, typer.Option(help="Also report to a tracker, inside the run folder.")
    ] = None,
    split_search: Annotated[
        bool, typer.Option("--split-search", help="Instead try which layers should be global, as 'mixfed split' does.")
    ] = False,
    json: Json = False,
) -> None:
    """Train one recipe with one algorithm, and write a run folder."""
    from mixfed.cli import common, run, split

    with common.reported():
        given = common.Given(
            recipe, settings or [], algorithm=algorithm, rounds=rounds, seed=seed, data=data, device=device,
            executor=executor, tuned=tuned,
        )  # fmt: skip
        if split_search:
            split.in_place_of_run(given, to_json=json, algorithm=algorithm, out=out, resume=resume, track=track)
        else:
            run.execute(given, out, resume=resume, track=track, as_json=json)


@app.command("compare")
def compare_command(
    recipe: RecipeName,
    algorithms: Annotated[str, typer.Option(help="Names with commas between.", metavar="A,B,C")],
    seeds: Annotated[str, typer.Option(help="Seeds with commas between.", metavar="0,1,2")] = "0",
    settings: Settings = None,
    rounds: Rounds = None,
    data: DataFolder = None,
    device: Device = None,
    executor: Executor = None,
    tuned: Tuned = None,
    out: Out = None,
    resume: Resume = False,
    probe: Annotated[bool, typer.Option(help="Predict how mixed methods compare, beside what happened.")] = True,
    json: Json = False,
) -> None:
    """Train one recipe with several algorithms and seeds; a table with mean ± spread, a plot, comparison.json."""
    from mixfed.cli import common, compare

    with common.reported():
        given = common.Given(
            recipe, settings or [], rounds=rounds, data=data, device=device, executor=executor, tuned=tuned
        )
        compare.execute(given, algorithms, seeds, out, resume=resume, as_json=json, probe=probe)


@app.command("probe")
def probe_command(
    recipe: RecipeName,
    rounds: Annotated[int, typer.Option(help="Rounds with one local step to look at.")] = 100,
    repeats: Annotated[int, typer.Option(help="How often to do it over, each time with another seed.")] = 5,
    settings: Settings = None,
    seed: Seed = None,
    data: DataFolder = None,
    device: Device = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Is Parallel Training enough? Measures how unlike clients and centre are, and advises."""
    from mixfed.cli import common, probe

    with common.reported():
        given = common.Given(recipe, settings or [], seed=seed, data=data, device=device)
        probe.execute(given, rounds, repeats, out, to_json=json)


@app.command("study")
def study_command(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A packaged study (see 'mixfed list') or a .toml.")],
    recipe: Annotated[str | None, typer.Option(help="Another recipe than the study's own.", metavar="RECIPE")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds with commas between.", metavar="0,1,2")] = "0",
    settings: Settings = None,
    rounds: Rounds = None,
    data: DataFolder = None,
    device: Device = None,
    executor: Executor = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Run a recipe at several settings; finished runs in the folder are taken as they are."""
    from mixfed.cli import common
    from mixfed.cli import study as command
    from mixfed.experiments import study as studies

    with common.reported():
        chosen = studies.load(study).on(recipe) if recipe else studies.load(study)
        given = common.Given(chosen.recipe, settings or [], rounds=rounds, data=data, device=device, executor=executor)
        command.execute(given, chosen, seeds, out, to_json=json)


@app.command("tune")
def tune_command(
    recipe: RecipeName,
    algorithms: Annotated[str, typer.Option(help="Names with commas between.", metavar="A,B,C")],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="Values to try, for all algorithms or for one; may be repeated, and adds to the recipe's own [tune].",
            metavar="[A:]KEY=V1,V2",
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Trials of each algorithm; as many as the smallest grid has by default.")
    ] = None,
    on: Annotated[str, typer.Option(help="What to score on.", metavar="validation|centre")] = "validation",
    metric: Annotated[str | None, typer.Option(help="What to score by; accuracy by default.")] = None,
    last: Annotated[int, typer.Option(help="The score is the best of so many last evaluations.")] = 5,
    seeds: Annotated[str, typer.Option(help="Seeds with commas between.", metavar="0,1,2")] = "0",
    settings: Settings = None,
    rounds: Rounds = None,
    data: DataFolder = None,
    device: Device = None,
    executor: Executor = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Choose settings of several algorithms with the same number of trials, never on test data; writes tuned.toml."""
    from mixfed.cli import common, tune

    with common.reported():
        given = common.Given(recipe, settings or [], rounds=rounds, data=data, device=device, executor=executor)
        tune.execute(
            given, algorithms, grid or [], seeds, out, trials=trials, on=on, metric=metric, last=last, to_json=json
        )


@app.command("split")
def split_command(
    recipe: RecipeName,
    settings: Settings = None,
    rounds: Rounds = None,
    seed: Seed = None,
    data: DataFolder = None,
    device: Device = None,
    executor: Executor = None,
    json: Json = False,
) -> None:
    """Which layers should be global? Tries all suffixes and prefixes of a model, on validation data."""
    from mixfed.cli import common, split

    with common.reported():
        given = common.Given(
            recipe, settings or [], rounds=rounds, seed=seed, data=data, device=device, executor=executor
        )
        split.execute(given, to_json=json)


@app.command("data")
def data_command(
    recipe: RecipeName,
    plot: Annotated[Path | None, typer.Option(help="Draw who holds what into this file.", metavar="FILE")] = None,
    settings: Settings = None,
    seed: Seed = None,
    data: DataFolder = None,
) -> None:
    """Who holds what in a recipe: clients, centre and test, in a table and a picture."""
    from mixfed.cli import common, holdings

    with common.reported():
        holdings.show(common.Given(recipe, settings or [], seed=seed, data=data), plot)


ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""What the command sets, unless it is set already, before PyTorch is loaded."""


def main() -> None:
    """The entry point of the command ``mixfed``.

    PyTorch's idle threads are asked to sleep soon (read when PyTorch is loaded, hence here): while they spin they take
    the other cores away from the clients, and from everyone else. They do spin for some microseconds, which is how
    soon the next operator comes; to be woken for each takes longer than most operators.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    app()
