"""The recipe, the command and the fingerprint of every run of an experiment. Nothing here needs PyTorch."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mixfed.errors import InputError
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.reproduce.definition import Definition, Method, slug
from mixfed.experiments.request import Request
from mixfed.experiments.schema import Table, shortened
from mixfed.experiments.texts import setting

Chosen = Mapping[str, Any]
"""Settings that tuning chose, by key."""

FREE = ("simulator.", "checkpoint.", "device", "data.folder", "data.cache", "stop.minutes")
"""Settings that a run may be given anew and stays the run that it is."""

_NOT_IN_FINGERPRINT = (
    *("name", "title", "paper", "published", "home", "device", "backend"),
    *("checkpoint", "simulator", "federation", "inputs"),
)


class Key(NamedTuple):
    """A run of an experiment."""

    label: str
    cell: str
    seed: int

    def __str__(self) -> str:
        return f"{self.label}{f' @ {self.cell}' if self.cell else ''}, seed {self.seed}"


@dataclass(frozen=True)
class Asked:
    """What the user says beside the name of an experiment: a folder with data, and settings of the simulation."""

    data: Path | None = None
    settings: Sequence[str] = ()

    def __post_init__(self) -> None:
        for text in self.settings:
            if not text.strip().startswith(FREE):
                raise InputError(
                    f"The settings of an experiment are those of its definition, so that --set takes only keys of the"
                    f" simulation ({', '.join(FREE)}), not '{shortened(text)}'; copy the definition to change it."
                )


@dataclass(frozen=True)
class Planned:
    """A run: the settings over its recipe, and how it is made complete."""

    key: Key
    method: Method
    request: Request
    own: Sequence[str]
    rounds: int

    def recipe(self) -> Recipe:
        """The complete recipe."""
        return self.request.on(self.request.base(), **self._more())

    def fingerprint(self) -> str:
        """A fingerprint of everything that was written for this run.

        What is left to defaults is not in it, so that a version that has more settings does not make old runs strange.
        """
        written = self.request.written(self.request.base(), **self._more())
        return fingerprint({"of": self.method.of, **what_is_said(written)})

    def command(self) -> str:
        """The command that makes the same run without the experiment."""
        verb = "probe" if self.method.of == "probe" else "run"
        words = ["mixfed", verb, self.request.recipe, "--seed", str(self.key.seed)]
        if self.method.of == "training":
            words += ["--algorithm", self.method.algorithm]
        if self.rounds:
            words += ["--rounds", str(self.rounds)]
        words += ["--repeats", "1"] if verb == "probe" else []
        return shlex.join([*words, *(word for text in self.own for word in ("--set", text))])

    def folder(self) -> str:
        """The name of the run's folder."""
        words = [slug(self.key.label), slug(self.key.cell), f"seed{self.key.seed}", self.fingerprint()[:6]]
        return "-".join(word for word in words if word)

    def _more(self) -> Table:
        trains = self.method.of == "training"
        more: Table = {"seed": self.key.seed} | ({"algorithm": self.method.algorithm} if trains else {})
        return more | ({"rounds": self.rounds} if self.rounds else {})


def plan(definition: Definition, chosen: Mapping[str, Chosen], asked: Asked | None = None) -> list[Planned]:
    """Every run, seed by seed so that a seed's data are dealt once; ``chosen`` are tuned settings by label.

    Runs of a method that is to be tuned and has not been yet are planned as its settings are without tuning.
    """
    seeds = list(dict.fromkeys([*definition.seeds, *(seed for method in definition.runs for seed in method.seeds)]))
    return [
        planned(definition, Key(method.label, cell.label, seed), chosen.get(method.label, {}), asked)
        for seed in seeds
        for cell in definition.cells
        for method in definition.runs
        if cell.label in definition.cells_of(method) and seed in (method.seeds or definition.seeds)
    ]


def planned(definition: Definition, key: Key, chosen: Chosen, asked: Asked | None = None) -> Planned:
    """One run."""
    method = definition.method(key.label)
    own = [*settings_at(definition, method, key.cell), *(setting(name, value) for name, value in chosen.items())]
    return Planned(key, method, _request(definition, method, own, asked), own, method.rounds or definition.rounds)


def settings_at(definition: Definition, method: Method, cell: str) -> list[str]:
    """What the definition says for a method in a cell."""
    return [*definition.set, *definition.cell(cell).set, *method.set]


def _request(definition: Definition, method: Method, own: Sequence[str], asked: Asked | None) -> Request:
    asked = asked or Asked()
    return Request(method.recipe or definition.recipe, [*own, *asked.settings], data=asked.data)


def tuning_request(definition: Definition, method: Method, asked: Asked | None = None) -> Request:
    """What ``mixfed tune`` is asked for a method: the settings of the cell in which methods are tuned."""
    assert definition.tune is not None
    cell = definition.cell(definition.tune.cell).label
    own = [*settings_at(definition, method, cell), *definition.tune.set]
    request = _request(definition, method, own, asked)
    rounds = definition.tune.rounds or method.rounds or definition.rounds
    if rounds:
        request.options["rounds"] = rounds
    return request


def what_is_said(written: Table) -> Table:
    """What decides a run, of a table before defaults are filled in."""
    table = {key: value for key, value in written.items() if key not in _NOT_IN_FINGERPRINT}
    table["data"] = {key: value for key, value in table.get("data", {}).items() if key not in ("folder", "cache")}
    name = table.get("algorithm", "")
    options = table.get("algorithms", {})
    used = {name, *(value for value in options.get(name, {}).values() if isinstance(value, str))}
    return table | {"algorithms": {key: value for key, value in options.items() if key in used}}


def fingerprint(table: Any) -> str:
    """A short fingerprint of a table, in which 1 and 1.0 are the same."""
    text = json.dumps(_plain(table), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
