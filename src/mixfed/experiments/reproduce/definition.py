"""What an experiment is: one short TOML.

::

    title, paper            what it is, and where the paper has it
    recipe, set, rounds     the recipe, and settings of all runs
    metric, last, percent   what is reported: the last evaluation, or the best of the ``last`` evaluations
    seeds, seconds          the seeds of every method, and about how long a run takes
    [[runs]]                a method: label, algorithm, further settings, the paper's figures
    [[cells]]               settings that every method is run at (none: there is one cell without a name)
    [tune]                  how settings are chosen; a method with a ``grid`` takes part
    [[claims]]              what a paper, or a page here, says of the figures (see judge)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_type_hints

from mixfed.errors import InputError
from mixfed.experiments.schema import Table, check, nearest, shown
from mixfed.experiments.texts import reproduction_table

T = TypeVar("T")


@dataclass(frozen=True)
class Method:
    """What is run in every cell with every seed: an algorithm with settings of its own.

    ``paper`` has its published figures by metric, or by ``"METRIC @ CELL"``. ``cells`` and ``seeds`` are its own where
    they are not those of the experiment. ``of`` says what kind of run it is: training, or a measurement.
    """

    label: str
    algorithm: str = ""
    recipe: str = ""
    of: Literal["training", "probe", "theory"] = "training"
    set: list[str] = field(default_factory=list)
    rounds: int = 0
    cells: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    seconds: float = 0.0
    grid: dict[str, list[Any]] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """Settings that every method is run at."""

    label: str
    set: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Tuning:
    """How methods with a grid choose their settings, in one of the cells: the first if none is named.

    ``trials`` points of each grid are tried, all where they are as many.
    """

    trials: int
    rounds: int = 0
    seeds: list[int] = field(default_factory=lambda: [10])
    set: list[str] = field(default_factory=list)
    on: Literal["validation", "centre"] = "validation"
    last: int = 5
    cell: str = ""


@dataclass(frozen=True)
class Claim:
    """Something said of the figures, which paired differences over seeds decide (:mod:`.judge`).

    Each of ``ahead`` is ahead of each of ``of`` by more than ``by``; each of ``near`` is within ``by`` of each of
    ``of``; or those of ``order`` are each ahead of the next. ``of_metric`` is the metric of ``of`` where it is not that
    of the others. ``id`` is the paper's claim that it is a test of.
    """

    text: str
    id: str = ""
    ahead: list[str] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    of: list[Any] = field(default_factory=list)
    by: float = 0.0
    metric: str = ""
    of_metric: str = ""
    cells: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Definition:
    """An experiment."""

    name: str
    title: str
    recipe: str
    metric: str
    runs: list[Method]
    paper: str = ""
    set: list[str] = field(default_factory=list)
    rounds: int = 0
    last: int = 1
    percent: bool = False
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    seconds: float = 60.0
    cells: list[Cell] = field(default_factory=lambda: [Cell("")])
    tune: Tuning | None = None
    claims: list[Claim] = field(default_factory=list)
    needs: str = ""
    """What is wanted to run it that is not at hand everywhere."""

    def method(self, label: str) -> Method:
        """The method of this label."""
        found = next((method for method in self.runs if method.label == label), None)
        if found is None:
            labels = [method.label for method in self.runs]
            raise InputError(f"{self.name} has no runs '{label}'; did you mean '{nearest(label, labels)}'?")
        return found

    def cell(self, label: str) -> Cell:
        """The cell of this label; the first without one."""
        found = next((cell for cell in self.cells if cell.label == label), None if label else self.cells[0])
        if found is None:
            told = nearest(label, [cell.label for cell in self.cells])
            raise InputError(f"{self.name} has no cell '{label}'; did you mean '{told}'?")
        return found

    def cells_of(self, method: Method) -> list[str]:
        """The cells that the method is run in."""
        return method.cells or [cell.label for cell in self.cells]

    def published(self, label: str, cell: str, metric: str) -> float | None:
        """The paper's figure."""
        figures = self.method(label).paper
        return figures.get(f"{metric} @ {cell}" if cell else metric)


def load(name: str) -> Definition:
    """A packaged experiment by its name, or one of the user's by the path of its TOML file."""
    stem, table = reproduction_table(name)
    try:
        found = _definition(stem, table)
        _refuse(found)
    except InputError as error:
        raise InputError(f"The experiment '{stem}' is not well formed: {str(error).rstrip('.')}.") from error
    return found


def slug(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


_SEPARATORS = ("@", " - ", "/", "|", ",", ";")
_SECTIONS: dict[str, Any] = {"runs": Method, "cells": Cell, "claims": Claim}


def _definition(name: str, table: Table) -> Definition:
    given: Table = {"name": name} | table
    for key, cls in _SECTIONS.items():
        if key in given:
            if not isinstance(given[key], list) or not given[key]:
                raise InputError(f"'{key}' takes one or more tables [[{key}]]")
            given[key] = [_read(cls, entry, key) for entry in given[key]]
    if "tune" in given:
        given["tune"] = _read(Tuning, given["tune"], "tune")
    return _read(Definition, given, "")


def _read(cls: type[T], table: Any, where: str) -> T:
    """The dataclass of a table, every key checked."""
    if not isinstance(table, Mapping):
        raise InputError(f"'{where}' takes a table, not {shown(table)}")
    hints, known = get_type_hints(cls), {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    at = f"{where}." if where else ""
    for key in table:
        if key not in known:
            raise InputError(f"there is no key '{at}{key}'; did you mean '{nearest(key, list(known))}'?")
    for key, item in known.items():
        if item.default is MISSING and item.default_factory is MISSING and key not in table:
            raise InputError(f"'{at}{key}' is missing")
    done = (*_SECTIONS, "tune")
    return cls(**{k: v if k in done and not where else check(v, hints[k], f"{at}{k}") for k, v in table.items()})


def _refuse(found: Definition) -> None:
    """Names that mean nothing, or two things."""
    for what, labels in (
        ("runs", [method.label for method in found.runs]),
        ("cells", [cell.label for cell in found.cells]),
        ("claims", [claim.text for claim in found.claims]),
    ):
        if len({slug(label) for label in labels}) < len(labels):
            raise InputError(f"two of its {what} have the same label, or labels that differ in signs only")
        if what != "claims" and any(sign in label for label in labels for sign in _SEPARATORS):
            raise InputError(f"labels of its {what} have none of {_SEPARATORS}, which stand between labels")
    for method in found.runs:
        if method.of == "training" and not method.algorithm:
            raise InputError(f"'{method.label}' trains, so it needs an algorithm")
        for cell in [*method.cells, *(key.partition(" @ ")[2] for key in method.paper)]:
            found.cell(cell)
        if method.grid and found.tune is None:
            raise InputError(f"'{method.label}' has a grid, and [tune] does not say how it is tried")
    if found.last < 1 or not found.seeds or found.seconds < 0:
        raise InputError("'last' is 1 or more, 'seconds' is not negative, and there is at least one seed")
    if found.tune is not None:
        found.cell(found.tune.cell)
    for claim in found.claims:
        _refuse_claim(found, claim)


def _refuse_claim(found: Definition, claim: Claim) -> None:
    kinds = [kind for kind in ("ahead", "near", "order") if getattr(claim, kind)]
    if len(kinds) != 1:
        raise InputError(f"the claim '{claim.text}' has one of the keys ahead, near and order, and has {len(kinds)}")
    if (kinds[0] == "order") == bool(claim.of):
        raise InputError(f"the claim '{claim.text}' says 'of' what it is, unless it is an order, which has none")
    if kinds[0] == "order" and len(claim.order) < 2:
        raise InputError(f"the claim '{claim.text}' has an order of one")
    if kinds[0] == "near" and claim.by <= 0:
        raise InputError(f"the claim '{claim.text}' says within how much, with 'by' above 0")
    for cell in claim.cells:
        found.cell(cell)
    for term in [*claim.ahead, *claim.near, *claim.order, *claim.of]:
        if isinstance(term, str):
            for label, cell in term_of(term):
                found.method(label)
                found.cell(cell)
        elif isinstance(term, bool) or not isinstance(term, int | float):
            raise InputError(f"the claim '{claim.text}' is about labels and numbers, not {shown(term)}")


def term_of(text: str) -> list[tuple[str, str]]:
    """``LABEL``, ``LABEL @ CELL``, or the difference ``A - B`` or the quotient ``A / B`` of two such, as pairs of label
    and cell."""
    parts = [part.partition(" @ ") for part in re.split(" [-/] ", text)]
    if len(parts) > 2:
        raise InputError(f"'{text}' is neither a label nor the difference or quotient of two")
    found = [(label.strip(), cell.strip()) for label, _, cell in parts]
    if len(found) == 2 and not found[0][1]:  # "A - B @ CELL" is of one cell
        found[0] = (found[0][0], found[1][1])
    return found


def is_quotient(term: Any) -> bool:
    """Whether a term is a share of something, and not an amount."""
    return isinstance(term, str) and " / " in term
