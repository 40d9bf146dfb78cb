"""What travels between a server and its sites: a parcel has a small header and blocks of bytes for several clients.

A site is one place with devices: a phone with one client, or a hospital with many. One parcel carries the requests of
all clients of a site, and what these have in common travels once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Protocol


@dataclass(frozen=True)
class Parcel:
    """A header of plain values, bytes that are common to all clients of the parcel, and a block for each of them."""

    header: dict[str, Any]
    common: bytes = b""
    blocks: Sequence[bytes] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """What the blocks weigh."""
        return len(self.common) + sum(map(len, self.blocks))


class Post(Protocol):
    """What carries parcels to sites, which have numbers, and their answers back."""

    def sites(self) -> set[int]:
        """The sites that can be reached now."""

    def send(self, parcels: Sequence[tuple[int, Parcel]], ttl: float) -> list[str | None]:
        """Sends parcels to sites, each to be answered within ``ttl`` seconds; their names (None: not sent)."""

    def receive(self, names: Collection[str]) -> list[tuple[str, Parcel | str]]:
        """Answers that have come to the parcels of these names; a text says why there will be none."""


def marks(experiment: str) -> dict[str, str]:
    """What both sides of a conversation must agree on; every header has it."""
    return {"experiment": experiment, "mixfed": version("mixfed")}


def refusal(header: dict[str, Any], experiment: str) -> str | None:
    """Why a parcel with this header is none of this experiment, in one sentence; None where it is."""
    ours = marks(experiment)
    if header.get("mixfed") != ours["mixfed"]:
        return f"One side runs mixfed {header.get('mixfed')} and the other {ours['mixfed']}; install the same version."
    if header.get("experiment") != experiment:
        return (
            f"One side runs the experiment {str(header.get('experiment'))[:12]} and the other {experiment[:12]}: their"
            " recipes differ, or code of your own that these name; start both from the same files."
        )
    return None
