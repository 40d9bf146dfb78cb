"""The command line. Only what ``--help`` needs is imported here; the rest waits until a command wants it.

A command completes its recipes before it imports a module that needs PyTorch, so that a bad one is refused at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from mixfed.backends.distributed.launch import local_rank, started_by_torchrun
from mixfed.cli.options import SHARED_DATA, asks_for, folder
from mixfed.cli.telling import QUIET, VERBOSE, Telling
from mixfed.errors import InputError
from mixfed.experiments.request import Request

app = typer.Typer(
    cls=Telling,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)

Algorithms = Annotated[str, typer.Option(help="Names with commas between.", metavar="A,B,C")]
Seeds = Annotated[str, typer.Option(help="Seeds with commas between.", metavar="0,1,2")]
Out = Annotated[
    Path | None, typer.Option(help="Folder to write to; a name under runs/ by default.", metavar="DIR", parser=folder)
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")]
Json = Annotated[bool, typer.Option("--json", help="End with the result as one line of JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(version("mixfed"))
        raise typer.Exit


@app.callback()
def main_command(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help=QUIET)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help=VERBOSE)] = False,
) -> None:
    """Learn one model from data you hold and data you cannot see: mixed federated learning."""
    from mixfed.cli.console import tell_more_or_less

    tell_more_or_less(quiet=quiet, verbose=verbose)
    if started_by_torchrun():
        from mixfed.cli.common import reported
        from mixfed.cli.console import be_quiet

        be_quiet(local_rank() > 0)  # until the ranks know each other
        with reported():
            if context.invoked_subcommand != "run":
                told = f"torchrun starts the ranks of 'mixfed run', and 'mixfed {context.invoked_subcommand}' has none"
                raise InputError(f"{told}; start it without torchrun.")


@app.command("list")
def list_command() -> None:
    """Algorithms, recipes and data sources, each with one line."""
    from mixfed.cli import listing

    listing.show()


@app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The recipe to write, NAME.toml.")],
    clients: Annotated[
        str, typer.Option(help="The clients' examples: a file, a folder, or a pattern in quotes.", metavar="FILE")
    ],
    central: Annotated[str | None, typer.Option(help="The centre's examples.", metavar="FILE")] = None,
    test: Annotated[
        str | None, typer.Option(help="The test examples; a share of the others by default.", metavar="FILE")
    ] = None,
    client: Annotated[
        str | None, typer.Option(help="The column that says whose an example is.", metavar="COLUMN")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column of labels.", metavar="COLUMN")] = None,
    features: Annotated[
        str | None, typer.Option(help="The columns to learn from, with commas between.", metavar="A,B,C")
    ] = None,
) -> None:
    """Look at files of your own and write a commented recipe for them, which runs as written."""
    from mixfed.cli.common import reported

    with reported():
        from mixfed.cli import new

        new.execute(name, clients, central, test, client, label, features)


@app.command("run")
@asks_for(
    *("algorithm", "rounds", "seed", "data", "device", "executor", "backend"),
    *("deterministic_sum", "max_minutes", "max_bytes", "tuned"),
)
def run_command(
    request: Request,
    out: Out = None,
    resume: Resume = False,
    track: Annotated[
        Literal["tensorboard", "mlflow", "wandb"] | None,
        typer.Option(help="Also report to a tracker, inside the run folder."),
    ] = None,
    split_search: Annotated[
        bool, typer.Option("--split-search", help="Instead try which layers should be global, as 'mixfed split' does.")
    ] = False,
    json: Json = False,
) -> None:
    """Train one recipe with one algorithm, and write a run folder."""
    request.on(request.base())  # refused here, if it is bad
    from mixfed.cli import run, split

    if split_search:
        if started_by_torchrun():
            raise InputError("--split-search tries layers in one process; leave out torchrun.")
        split.in_place_of_run(request, to_json=json, out=out, resume=resume, track=track)
    else:
        run.execute(request, out, resume=resume, track=track, as_json=json)


@app.command("compare")
@asks_for("rounds", "data", "device", "executor", "max_minutes", "max_bytes", "tuned")
def compare_command(
    request: Request,
    algorithms: Algorithms,
    seeds: Seeds = "0",
    out: Out = None,
    resume: Resume = False,
    probe: Annotated[bool, typer.Option(help="Predict how mixed methods compare, beside what happened.")] = True,
    json: Json = False,
) -> None:
    """Train one recipe with several algorithms and seeds; a table with mean ± spread, a plot, comparison.json."""
    from mixfed.cli.common import numbers_of, words

    recipes = request.recipes(words(algorithms, "--algorithms"), numbers_of(seeds))
    from mixfed.cli import compare

    compare.execute(recipes, out, resume=resume, probe=probe, to_json=json)


@app.command("probe")
@asks_for("seed", "data", "device")
def probe_command(
    request: Request,
    rounds: Annotated[int, typer.Option(help="Rounds with one local step to look at.")] = 100,
    repeats: Annotated[int, typer.Option(help="How often to do it over, each time with another seed.")] = 5,
    out: Out = None,
    json: Json = False,
) -> None:
    """Is Parallel Training enough? Measures how unlike clients and centre are, and advises."""
    recipe = request.on(request.base())
    from mixfed.cli import probe

    probe.execute(recipe, rounds, repeats, out, to_json=json)


@app.command("advise")
@asks_for("rounds", "seed", "data", "device", "executor")
def advise_command(
    request: Request,
    minutes: Annotated[float, typer.Option(help="For how long to try methods.")] = 5,
    metric: Annotated[str | None, typer.Option(help="What to judge by; accuracy by default.")] = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Which method should I use? Looks at who holds what, tries methods on validation data, and says why."""
    request.on(request.base())  # refused here, if it is bad
    from mixfed.cli import advise

    advise.execute(request, minutes, metric, out, to_json=json)


@app.command("study")
@asks_for("rounds", "data", "device", "executor", recipe=False)
def study_command(
    ask: Callable[[str], Request],
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A packaged study (see 'mixfed list') or a .toml.")],
    recipe: Annotated[str | None, typer.Option(help="Another recipe than the study's own.", metavar="RECIPE")] = None,
    seeds: Seeds = "0",
    out: Out = None,
    json: Json = False,
) -> None:
    """Run a recipe at several settings; finished runs in the folder are taken as they are."""
    from mixfed.experiments.texts import study_table

    study_table(study)  # refused at once, if there is no such study
    from mixfed.cli import study as command
    from mixfed.experiments import study as studies

    chosen = studies.load(study).on(recipe) if recipe else studies.load(study)
    command.execute(ask(chosen.recipe), chosen, seeds, out, to_json=json)


@app.command("tune")
@asks_for("rounds", "data", "device", "executor")
def tune_command(
    request: Request,
    algorithms: Algorithms,
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
    seeds: Seeds = "0",
    out: Out = None,
    json: Json = False,
) -> None:
    """Choose settings of several algorithms with the same number of trials, never on test data; writes tuned.toml."""
    from mixfed.cli import tune

    tune.execute(
        request, algorithms, grid or [], seeds, out, trials=trials, on=on, metric=metric, last=last, to_json=json
    )


@app.command("reproduce")
def reproduce_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="An experiment or a .toml; without one, what is stored.")
    ] = None,
    data: Annotated[Path | None, SHARED_DATA] = None,
    only: Annotated[str | None, typer.Option(help="Labels of methods with commas between.", metavar="A,B")] = None,
    cells: Annotated[str | None, typer.Option(help="Labels of cells with commas between.", metavar="A,B")] = None,
    seeds: Annotated[str | None, typer.Option(help="Some of its seeds with commas between.", metavar="0,1,2")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="How it is simulated (simulator.…); may be repeated."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads and cores that a run may take.")] = None,
    out: Out = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder with the files of results.", metavar="DIR", parser=folder)
    ] = None,
    pages: Annotated[
        Path | None, typer.Option(help="Rewrite the pages in this folder from stored results.", metavar="DIR")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only check that stored files, definitions and pages agree.")
    ] = False,
) -> None:
    """Run what is missing of an experiment, store its figures, and say whether the paper's claims hold."""
    from mixfed.cli.common import reported

    with reported():
        from mixfed.cli import reproduce

        store = store or Path("results")
        if check:
            reproduce.check(name, store, pages)
        elif pages is not None:
            reproduce.write_pages(store, pages)
        elif name is None:
            reproduce.show_stored(store)
        else:
            reproduce.execute(
                name, store, out, data=data, only=only, cells=cells, seeds=seeds, settings=settings, threads=threads
            )


@app.command("split")
@asks_for("rounds", "seed", "data", "device", "executor")
def split_command(request: Request, json: Json = False) -> None:
    """Which layers should be global? Tries all suffixes and prefixes of a model, on validation data."""
    recipe = request.on(request.base())
    from mixfed.cli import split

    split.execute(recipe, to_json=json)


@app.command("data")
@asks_for("seed", "data")
def data_command(
    request: Request,
    plot: Annotated[Path | None, typer.Option(help="Draw who holds what into this file.", metavar="FILE")] = None,
) -> None:
    """Who holds what in a recipe: clients, centre and test, in a table and a picture."""
    recipe = request.on(request.base())
    from mixfed.cli import ownership

    ownership.show(recipe, plot)


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="Runs or comparisons, side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; report.html in the folder by default.", metavar="FILE")
    ] = None,
) -> None:
    """Make the page with everything about runs or comparisons anew: one HTML file."""
    from mixfed.cli import report

    report.execute(folders, out)


@app.command("predict")
def predict_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    data: Annotated[Path, typer.Option(help="File with the examples: .npz, CSV, Parquet, Arrow.", metavar="FILE")],
    out: Annotated[Path | None, typer.Option(help="CSV to write; beside the file by default.", metavar="FILE")] = None,
    client: Annotated[int | None, typer.Option(help="Ask this client's own model.")] = None,
) -> None:
    """Answer the examples in a file with the trained network of a run."""
    from mixfed.cli import using

    using.answer_file(run, data, out, client)


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    to: Annotated[Literal["state_dict", "onnx"], typer.Option(help="The format.")] = "state_dict",
    out: Annotated[
        Path | None, typer.Option(help="File to write; in the run folder by default.", metavar="FILE")
    ] = None,
) -> None:
    """Write the trained network of a run for other programs."""
    from mixfed.cli import using

    using.export_model(run, to, out)


federation = typer.Typer(
    cls=Telling, no_args_is_help=True, help="A recipe as a federation of real sites (with the extra 'flower')."
)
app.add_typer(federation, name="flower")


@federation.command("init")
@asks_for("algorithm", "rounds", "seed", "data", "tuned", recipe=False)
def flower_init_command(
    ask: Callable[[str], Request],
    app_folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the app.", parser=folder)],
    recipe: Annotated[str, typer.Option(metavar="RECIPE", help="A packaged recipe or a .toml.")],
) -> None:
    """Write a small Flower app of a recipe, to edit and to start with 'flwr run'."""
    request = ask(recipe)
    from mixfed.cli import flower

    flower.init(request, app_folder)


@federation.command("local")
@asks_for("algorithm", "rounds", "seed", "data", "tuned")
def flower_local_command(
    request: Request,
    clients: Annotated[int, typer.Option(help="Sites to start; the recipe's clients are dealt to them.")] = 4,
    out: Out = None,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Run a recipe on a SuperLink and sites on this machine, and stop them again."""
    request.on(request.base())
    from mixfed.cli import flower

    flower.local(request, clients, out, resume=resume, as_json=json)


@federation.command("site", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def flower_site_command(context: typer.Context) -> None:
    """A site that stays warm: takes the options of 'flower-supernode', and runs the app in the same process."""
    from mixfed.cli import flower

    flower.site(context.args)


ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""What the command sets, unless it is set already, before PyTorch is loaded."""


def main() -> None:
    """The entry point of the command ``mixfed``.

    PyTorch's idle threads are asked to sleep soon (read when PyTorch is loaded, hence here): while they spin they take
    the other cores away from the clients, and from everyone else. They do spin for some microseconds, which is how
    soon the next operator comes; to be woken for each takes longer than most operators.
    """
    from mixfed.cli.console import show_what_can_be_shown

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    show_what_can_be_shown()
    app()
