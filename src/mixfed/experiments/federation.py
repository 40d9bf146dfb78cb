"""A recipe as a federation: the server's part, the sites' part, and the small Flower app that both are started from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mixfed.backends.federation import Federation, Terms
from mixfed.backends.site import Holding, Site
from mixfed.core.algorithm import CLIENTS
from mixfed.core.files import append, write_atomically
from mixfed.core.loop import Result
from mixfed.data.scenario import Scenario
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.build import Experiment, build, build_algorithm, measure_of
from mixfed.experiments.folder import RunFolder, identity
from mixfed.experiments.inputs import code_fingerprints
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.running import run_in_folder
from mixfed.experiments.scenario import build_scenario, featured

if TYPE_CHECKING:
    from mixfed.backends.flower import ClientApp, Grid, ServerApp

OwnData = Callable[[Mapping[str, Any]], tuple[FederatedData, Mapping[str, FederatedData]]]
"""From what ``--node-config`` says: a site's own examples, and those that its clients keep apart, by name."""


def read_recipe(file: str | Path) -> Recipe:
    """The complete recipe in a file, as one of a federation."""
    return replace(toml.resolve(toml.load(str(file))), backend="flower")


def federated(
    experiment: Experiment, grid: Grid, folder: RunFolder, say: Callable[[str], None], **options: Any
) -> Experiment:
    """The experiment with its clients elsewhere; every delay that is seen is a line of the folder's delays.csv.

    ``options`` are those of a :class:`mixfed.backends.federation.Federation`.
    """
    from mixfed.backends.flower import FlowerBackend

    delays = folder.path / "delays.csv"

    def observe(source: str, client: int, round: int, delay: float) -> None:
        head = "" if delays.exists() else "source,client,round,delay\n"
        append(delays, f"{head}{source},{client},{round},{delay:.6f}\n".encode())

    terms = terms_of(experiment.recipe)
    remote = FlowerBackend(grid, experiment_of(experiment.recipe), terms, observe=observe, say=say, **options)
    return replace(experiment, remote=remote)


def experiment_of(recipe: Recipe) -> str:
    """The fingerprint that all sides of a federation compute: of the recipe, and of code of the user's own."""
    code = json.dumps(code_fingerprints(recipe)).encode()
    return hashlib.blake2b(identity(recipe).encode() + code, digest_size=16).hexdigest()


def terms_of(recipe: Recipe) -> Terms:
    """How long the recipe's federation waits."""
    given = asdict(recipe.federation)
    for name, value in given.items():
        if not value > 0:
            raise InputError(f"federation.{name} is a number of seconds above 0, not {value:g}.")
    return Terms(**given)


def write_traffic(folder: RunFolder, experiment: Experiment, result: Result) -> dict[str, Any]:
    """What really travelled, in federation.json, beside what the ledger (and so the simulator) counts for it."""
    assert isinstance(experiment.remote, Federation)
    traffic = asdict(experiment.remote.traffic)
    counted = {name: result.ledger[name] for name in ("bytes_down", "bytes_up")}
    found = {"traffic": traffic, "ledger": counted, "seconds": round(result.seconds, 3), "rounds": result.rounds}
    write_atomically(folder.path / "federation.json", (json.dumps(found, indent=2) + "\n").encode())
    return found


def serve(grid: Grid, recipe: Recipe, out: Path, *, resume: bool = False, scenario: Scenario | None = None) -> Result:
    """The server's part of a run in the folder ``out``; it goes on with a run that is there if it is to ``resume``."""
    folder = RunFolder(out)
    if resume and folder.config.exists():
        folder.adopt(recipe)
    elif folder.config.exists():
        told = f"""{out} already holds a run; go on with it (--run-config 'out="{out}" resume=true')"""
        raise InputError(f"{told}, or say another folder.")
    known = featured(recipe, scenario) if scenario else None
    experiment = federated(build(recipe, known), grid, folder, say=_tell)
    result = run_in_folder(experiment, folder, resume=resume and folder.config.exists(), callbacks=[_report], say=_tell)
    write_traffic(folder, experiment, result)
    return result


def site_of(
    recipe: Recipe,
    node: Mapping[str, Any],
    *,
    data: OwnData | None = None,
    classes: int | None = None,
) -> Site:
    """The site that holds the clients that ``--node-config`` names: of the recipe's own data, or of other ``data``.

    No site sees all labels, so it has to be told how many ``classes`` the other data have.
    """
    numbers = client_numbers(str(node.get("clients", "")))
    if "folder" not in node:
        raise InputError('A site keeps what is its clients\' in a folder; say folder="..." in --node-config.')
    if data is not None:
        clients, tests = data(node)
        some = clients.pooled()
        central = None if recipe.data.central.kind == "none" else some  # which only the server makes use of
        known = featured(recipe, replace(Scenario.of(clients, some, central, classes), own=dict(tests)))
        algorithm, clients = build_algorithm(recipe, known)
        tests = known.own
    else:
        scenario = build_scenario(recipe)
        algorithm, everybody = build_algorithm(recipe, scenario)
        _require_known(numbers, len(everybody))
        clients, tests = everybody.select(numbers), {n: own.select(numbers) for n, own in scenario.own.items()}
    holding = Holding(numbers, clients, tests)
    folder, measure = Path(str(node["folder"])), measure_of(recipe)
    how = recipe.simulator.executor
    return Site(algorithm, {CLIENTS: holding}, experiment_of(recipe), folder, measure=measure, executor=how, say=_tell)


def client_numbers(text: str) -> list[int]:
    """Numbers of clients from text such as ``0-3,7``."""
    found: list[int] = []
    for word in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"""A site says which clients it holds, clients="0-3,7" in --node-config, not '{text}'.""")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def dealt(clients: int, sites: int) -> list[str]:
    """The clients of a population on so many sites, as :func:`client_numbers` reads them."""
    if not 1 <= sites <= clients:
        raise InputError(f"The {clients} clients of the recipe can be dealt to 1 to {clients} sites, not to {sites}.")
    return [",".join(map(str, part.tolist())) for part in np.array_split(np.arange(clients), sites)]


def client_app(recipe: str | Path, data: OwnData | None = None, classes: int | None = None) -> ClientApp:
    """Flower's app of a site: of the recipe's own data, or of other ``data`` with so many ``classes``."""
    from mixfed.backends.flower import client_app as app

    return app(lambda node, run: site_of(_of_run(recipe, run), node, data=data, classes=classes))


def server_app(recipe: str | Path, scenario: Callable[[], Scenario] | None = None) -> ServerApp:
    """Flower's app of the server; ``--run-config`` says where it writes (out), and whether it goes on (resume)."""
    from mixfed.backends.flower import server_app as app

    def main(grid: Grid, run: Mapping[str, Any]) -> None:
        chosen = _of_run(recipe, run)
        out = Path(str(run.get("out") or f"runs/{chosen.name}-{chosen.algorithm}-seed{chosen.seed}"))
        serve(grid, chosen, out, resume=bool(run.get("resume")), scenario=scenario() if scenario else None)

    return app(main)


def _of_run(file: str | Path, run: Mapping[str, Any]) -> Recipe:
    """The recipe with the settings of a run: ``--run-config 'set="rounds=20 seed=1"'``."""
    table = toml.override(toml.load(str(file)), str(run.get("set", "")).split())
    chosen = toml.chosen(table, table.get("algorithm", Recipe.algorithm))
    return replace(toml.resolve(chosen), backend="flower")


def _require_known(numbers: list[int], count: int) -> None:
    if max(numbers) >= count:
        raise InputError(f"The recipe has clients 0 to {count - 1}, and a site is to hold client {max(numbers)}.")


def _tell(sentence: str) -> None:
    print(sentence, flush=True)


def _report(record: Any) -> None:
    told = "  ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
    _tell(f"round {record.round} of {record.rounds}  {told}")
