"""Things of the user's own in a recipe: ``"file.py:Name"``, or ``"package.module:Name"``, or ``"…:Class.function"``.

A file is looked for from the recipe's folder, and so are modules that are not installed. Nothing here needs PyTorch;
what is loaded may.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mixfed.errors import OWN, InputError
from mixfed.experiments.schema import nearest, shortened

OBJECTS = "mixfed.experiments.objects"
"""Where objects of a program are found that a recipe names."""


def short(name: str) -> str:
    """The name without its place: what a table, a folder or a section of the recipe calls it."""
    return name.rpartition(":")[2].rpartition(".")[2]


def find(name: str, home: str, key: str) -> Callable[..., Any]:
    """The function or class of that name; networks of torchvision and timm have names such as ``timm:resnet18``."""
    package, _, inside = name.partition(":")
    if key == "model.name" and package in ("torchvision", "timm"):
        from mixfed.models.catalogues import CATALOGUES

        return CATALOGUES[package](inside)
    return load_function(name, home, key)


def load(name: str, home: str, key: str) -> Any:
    """What the name stands for; ``home`` is the recipe's folder, and ``key`` is told where something is wrong."""
    place, _, path = name.rpartition(":")
    if not place or not all(part.isidentifier() for part in path.split(".")):
        raise InputError(f"'{key}' takes 'file.py:Name' or 'package.module:Name', not '{shortened(name)}'.")
    found: Any = module_of(place, home, key)
    before = f"{place}:"
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            if place == OBJECTS:
                told = f"'{key}' is an object of the program that began the run"
                raise InputError(f"{told}, and this one has not made it; make the task as it did first.")
            there = [n for n in dir(found) if not n.startswith("_") and callable(getattr(found, n, None))]
            hint = f"did you mean '{before}{nearest(attribute, there)}'?" if there else "it defines nothing to call."
            raise InputError(f"'{key}': {before.rstrip(':.')} has no '{attribute}'; {hint}")
        found, before = getattr(found, attribute), f"{before}{attribute}."
    return found


def load_function(name: str, home: str, key: str) -> Callable[..., Any]:
    """The same for what is called: a function or a class."""
    found = load(name, home, key)
    if not (inspect.isroutine(found) or inspect.isclass(found)):
        raise InputError(f"'{key}' names a function or a class, and '{name}' is a {type(found).__name__}.")
    function: Callable[..., Any] = found
    return function


def files_of_code(name: str, home: str, key: str) -> list[Path]:
    """The file that a name leads to, and the modules beside it that it loads; nothing of packages known here."""
    place = name.rpartition(":")[0]
    if place.split(".")[0] in ("mixfed", "torchvision", "timm"):
        return []
    if place.endswith(".py"):
        return list(_in_file(place, home, key)[1])
    file = getattr(module_of(place, home, key), "__file__", None)
    return _beside(Path(file).resolve(), sys.modules) if file else []


def file_of(path: str, home: str, key: str) -> Path:
    """A file by its path from the recipe's folder, or inside an installed package: ``"package:path/to/file"``."""
    package, _, inside = path.rpartition(":")
    if not package:
        return Path(home, path)
    folder = Path(getattr(module_of(package, home, key), "__file__", None) or ".").parent
    return folder / inside


def module_of(place: str, home: str, key: str) -> ModuleType:
    """The module at a place: a file ending in .py, or a module by its dotted name."""
    if place.endswith(".py"):
        return _in_file(place, home, key)[0]
    if home:
        _look_in(Path(home).resolve())
    return _imported(place, key)


def _in_file(place: str, home: str, key: str) -> tuple[ModuleType, tuple[Path, ...]]:
    folder = Path(home or ".").resolve()
    file = folder / place
    if not file.is_file():
        raise InputError(f"'{key}': there is no file {file}; paths are looked for from the recipe's folder.")
    _look_in(folder, file.resolve().parent)
    return _executed(file.resolve(), file.stat().st_mtime_ns, key)


def _imported(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(
                f"'{key}': there is no module '{error.name}'; install it, or name a file as in 'file.py:Name'."
            ) from error
        raise _broken(name, key, error) from error
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        raise _broken(name, key, error) from error


@cache
def _executed(file: Path, changed: int, key: str) -> tuple[ModuleType, tuple[Path, ...]]:
    """The module in a file, loaded once while the file is as it was when it was ``changed``, and the files it is of."""
    name = f"{OWN}{file.stem}_{abs(hash(file)):x}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"'{key}': {file} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickles look for it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        del sys.modules[name]
        raise _broken(str(file), key, error) from error
    alone = {name: other for name, other in sys.modules.items() if name == Path(_place_of(other) or "/").stem}
    return module, tuple(_beside(file, alone))  # whoever reads the recipe may have come as a package from this folder


def _beside(file: Path, loaded: Mapping[str, ModuleType]) -> list[Path]:
    """The file and those of loaded modules that are in its folder."""
    places = {Path(place).resolve() for place in map(_place_of, loaded.values()) if place}
    return sorted({file, *(place for place in places if place.parent == file.parent)})


def _place_of(module: ModuleType) -> str | None:
    return getattr(module, "__file__", None)


_folders: list[str] = []
"""Where modules of the recipe at hand are looked for first."""


def _look_in(*folders: Path) -> None:
    """Modules in these folders can be imported, before others as those beside a script can.

    Another recipe may have modules of the same names in its own folders, so those of other folders are forgotten.
    """
    wanted = [str(folder) for folder in dict.fromkeys(folders)]
    for former in set(_folders) - set(wanted):
        if former in sys.path:
            sys.path.remove(former)
        for name, module in [*sys.modules.items()]:
            if str(Path(getattr(module, "__file__", None) or "/").parent) == former:
                del sys.modules[name]
    sys.path[:0] = [folder for folder in wanted if folder not in _folders]
    _folders[:] = wanted


def failure(error: BaseException) -> str | None:
    """Where a user's own code failed, in a sentence; None if what failed is not the user's."""
    files = {module.__file__ for name, module in sys.modules.items() if name.startswith(OWN)}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files or _is_beside(f.filename)]
    return _fails(frames[-1].filename, frames[-1].lineno, error) if frames else None


def _is_beside(file: str) -> bool:
    return str(Path(file).parent) in _folders


def _broken(place: str, key: str, error: BaseException) -> InputError:
    """A sentence with the line of the user's code at which it failed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == place]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    return InputError(f"'{key}': {_fails(place, line, error)}")


def _fails(place: str, line: int | None, error: BaseException) -> str:
    where = f" in line {line}" if line else ""
    told = shortened(" ".join(str(getattr(error, "msg", None) or error).split()), 200).rstrip(".")
    return f"{place} fails{where} with {type(error).__name__}{f': {told}' if told else ''}."
