"""Fingerprints of the files that a run is made of, so that a resumed run notices where one has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from mixfed.data.encoding import CHARACTERS
from mixfed.data.sources.files import files_at
from mixfed.errors import InputError
from mixfed.experiments import own
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.schema import is_own


def fingerprints(recipe: Recipe) -> dict[str, str]:
    """A fingerprint of each file of the user's own: code, weights and data, by its path in its folder.

    Of code these are the file that the recipe names and what it imports from the same folder. What a source of the
    user's own reads is not known.
    """
    return _told(_files(recipe))


def code_fingerprints(recipe: Recipe) -> dict[str, str]:
    """The same of code alone, which all sides of a federation have; data are each side's own."""
    return _told(_code(recipe))


def _told(files: Iterable[tuple[Path, Path]]) -> dict[str, str]:
    found = {}
    for file, folder in files:
        name = file.relative_to(folder) if file.is_relative_to(folder) else file
        found[name.as_posix()] = _fingerprint(file)
    return dict(sorted(found.items()))


def require_same_inputs(recipe: Recipe, told: str) -> None:
    """Refuses to go on with a run (``told``) whose files are not as its recipe says that they were."""
    if not recipe.inputs:
        return
    now = fingerprints(recipe)
    for name, before in recipe.inputs.items():
        if now.get(name) != before:
            what = "has changed" if name in now else "is gone"
            raise InputError(f"The file {name} {what} since {told}; put it back, or start a new run.")
    if now.keys() - recipe.inputs.keys():
        raise InputError(f"The file {min(now.keys() - recipe.inputs.keys())} is new since {told}; start a new run.")


def changed_since(recipe: Recipe) -> list[str]:
    """Files of the network's code that are not as they were when the run of the recipe began."""
    home = Path(recipe.home or ".").resolve()
    files = own.files_of_code(recipe.model.name, recipe.home, "model.name") if is_own(recipe.model.name) else []
    now = _told((file, home) for file in files)
    return [name for name, found in now.items() if recipe.inputs.get(name, found) != found]


def _code(recipe: Recipe) -> Iterator[tuple[Path, Path]]:
    """Every file of code, with the folder that its name is told from."""
    home = Path(recipe.home or ".").resolve()
    code = {
        "data.source": [recipe.data.source],
        "model.name": [recipe.model.name],
        "model.criterion": [recipe.model.criterion],
        "evaluate.metrics": recipe.evaluate.metrics,
        "algorithm": [recipe.methods[recipe.algorithm]] if recipe.algorithm in recipe.methods else [],
    }
    for key, names in code.items():
        for name in filter(is_own, names):
            yield from ((file, home) for file in own.files_of_code(name, recipe.home, key))


def _files(recipe: Recipe) -> Iterator[tuple[Path, Path]]:
    """Every file: code, weights and data."""
    home = Path(recipe.home or ".").resolve()
    yield from _code(recipe)
    if recipe.model.weights:
        yield own.file_of(recipe.model.weights, recipe.home, "model.weights"), home
    if recipe.data.source == "files":
        place = Path(recipe.data.folder or recipe.home or ".").resolve()
        given = recipe.data.options
        paths = [given["clients"], recipe.data.central.file, given["test"]]
        paths += [given["text"]] if given["text"] != CHARACTERS else []
        yield from ((file, place) for path in paths if path for file in files_at(place, path))


def _fingerprint(file: Path) -> str:
    """Of the bytes of a file, or of all files in a folder with their names."""
    digest = hashlib.blake2b(digest_size=16)
    for part in sorted(file.rglob("*")) if file.is_dir() else [file]:
        if part.is_file():
            digest.update(part.name.encode() if part != file else b"")
            with part.open("rb") as stream:
                while piece := stream.read(1 << 20):
                    digest.update(piece)
    return digest.hexdigest()
