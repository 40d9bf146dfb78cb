"""What the papers claim, one line each (papers.toml)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from mixfed.errors import InputError
from mixfed.experiments.texts import parse

PAPERS = {
    "mixed": "Augenstein et al., Mixed Federated Learning (2022)",
    "mixing": "Augenstein et al., Mixing decentralized and centralized data (2021)",
    "feddle": "Guided Model Merging for Hybrid Data Learning (Feddle)",
    "lg": "Liang et al., Think Locally, Act Globally (2020)",
}


@dataclass(frozen=True)
class PaperClaim:
    """A claim of a paper: where it is, in words, with its figure, and what there is to say of it beside runs."""

    id: str
    paper: str
    text: str
    figure: str = ""
    where: str = ""
    note: str = ""


@cache
def all_claims() -> dict[str, PaperClaim]:
    """Every claim by its id."""
    text = files("mixfed.experiments.reproduce").joinpath("papers.toml").read_text(encoding="utf-8")
    listed: list[dict[str, Any]] = parse(text, "The list of claims")["claims"]
    found = {entry["id"]: PaperClaim(**entry) for entry in listed}
    if len(found) < len(listed) or any(claim.paper not in PAPERS for claim in found.values()):
        raise InputError("The list of claims has an id twice, or a paper that there is not.")
    return found


def claims_of(paper: str) -> list[PaperClaim]:
    """The claims of a paper."""
    return [claim for claim in all_claims().values() if claim.paper == paper]
