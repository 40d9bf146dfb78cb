"""``mixfed flower``: a recipe as a federation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mixfed.cli.common import reported
from mixfed.cli.console import stdout
from mixfed.cli.run import open_folder, show, train
from mixfed.errors import InputError
from mixfed.experiments.app import write_app
from mixfed.experiments.build import Experiment
from mixfed.experiments.federation import dealt, federated, terms_of, write_traffic
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.request import Request


def require_flower() -> None:
    """Refuses to begin where the extra is not installed."""
    try:
        import mixfed.backends.flower  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"A federation needs Flower ({error}); install it with: pip install 'mixfed[flower]'"
        ) from error


def init(request: Request, folder: Path) -> None:
    """Writes the app of a recipe."""
    recipe = request.on(request.base(), backend="flower")
    write_app(folder, recipe)
    told = f"The app is in {folder}; with a SuperLink and sites (docs/deploy.md), start it with: flwr run {folder}"
    stdout.print(f"{told} SUPERLINK", soft_wrap=True)


def site(options: list[str]) -> None:
    """Becomes a site."""
    with reported():
        require_flower()
    from mixfed.backends.flower.worker import main

    main(options)


def local(request: Request, clients: int, out: Path | None, *, resume: bool, as_json: bool) -> None:
    """Starts a federation on this machine, runs the recipe on it, and stops everything."""
    require_flower()
    request.options["backend"] = "flower"
    folder, recipe, resume = open_folder(request, out, resume)
    found = folder.finished() if resume else None
    if found is None:
        with folder.locked():
            found = _federate(request, recipe, folder, clients, resume)
    told: dict[str, Any] = json.loads((folder.path / "federation.json").read_text())
    for way in ("bytes_down", "bytes_up"):
        stdout.print(f"{way}: {told['traffic'][way]:,} travelled, {told['ledger'][way]:,} counted by the ledger")
    show(recipe, folder, found, as_json)


def _federate(request: Request, recipe: Recipe, folder: RunFolder, sites: int, resume: bool) -> dict[str, Any]:
    from mixfed.backends.flower.local import LocalFederation
    from mixfed.experiments.build import build

    terms_of(recipe)  # refused before anything is started
    experiment = build(recipe)
    place = folder.path.resolve() / "federation"
    nodes = [
        f'clients="{clients}" folder="{place / "sites" / str(i)}"'
        for i, clients in enumerate(dealt(len(experiment.clients), sites))
    ]
    app = place / "app"
    if not app.exists():
        write_app(app, recipe, travels=False)
    with LocalFederation(place, nodes) as federation, federation.grid(app) as grid:
        made: list[Experiment] = []

        def elsewhere(say: Any) -> Experiment:
            made.append(federated(experiment, grid, folder, say, possible=federation.sites_alive))
            return made[-1]

        result = train(request, recipe, folder, resume, None, elsewhere)
        write_traffic(folder, made[-1], result)
    return folder.finished() or {}
