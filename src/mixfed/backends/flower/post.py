"""Parcels as messages of Flower: ``Grid.push_messages`` and ``Grid.pull_messages`` are the post."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from mixfed.backends.federation import Federation, Terms
from mixfed.backends.parcels import Parcel
from mixfed.errors import InputError

_TYPES = {"train": "train", "evaluate": "evaluate"}
"""Flower's types of messages by the kind of parcel; all others are queries."""


LARGE = 1 << 20
"""Bytes from which on a block travels as an array, which Flower cuts into chunks and keeps once for all messages that
have it. Every array is four more requests on each of its ways, so that smaller blocks are in the header's record."""


def to_record(parcel: Parcel, common: ArrayRecord | None = None) -> RecordDict:
    """A parcel as records of Flower; the ``common`` bytes may be given as a record that other messages share."""
    told = ConfigRecord({"header": json.dumps(parcel.header)})
    records = RecordDict({"mixfed": told})
    for name, blocks in (("common", [parcel.common] if parcel.common else []), ("blocks", parcel.blocks)):
        if sum(map(len, blocks)) >= LARGE:
            records[name] = common if common and name == "common" else _bytes(blocks)
        elif blocks:
            told[name] = list(blocks)
    return records


def from_record(records: RecordDict) -> Parcel:
    """The parcel in records of Flower."""
    try:
        told = records.config_records["mixfed"]
        header = json.loads(str(told["header"]))
        held = {name: cast(list[bytes], told.get(name, [])) for name in ("common", "blocks")}
        held |= {name: [array.data for array in record.values()] for name, record in records.array_records.items()}
        if not isinstance(header, dict) or not all(isinstance(x, bytes) for blocks in held.values() for x in blocks):
            raise ValueError
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError("What came over the network is no parcel that mixfed made.") from error
    return Parcel(header, b"".join(held["common"]), held["blocks"])


def _bytes(blocks: Sequence[bytes]) -> ArrayRecord:
    return ArrayRecord({f"{i:06d}": Array("uint8", (len(block),), "bytes", block) for i, block in enumerate(blocks)})


class GridPost:
    """Flower's grid as a post. What several messages have in common is sent to the SuperLink once."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def sites(self) -> set[int]:
        """The nodes that are online."""
        return set(self.grid.get_node_ids())

    def send(self, parcels: Sequence[tuple[int, Parcel]], ttl: float) -> list[str | None]:
        """Pushes a message for each parcel."""
        shared: dict[int, ArrayRecord] = {}
        messages = []
        for site, parcel in parcels:
            if len(parcel.common) >= LARGE and id(parcel.common) not in shared:
                shared[id(parcel.common)] = _bytes([parcel.common])
            record = to_record(parcel, shared.get(id(parcel.common)))
            kind = _TYPES.get(str(parcel.header.get("kind")), "query")
            messages.append(Message(record, site, kind, ttl=ttl))
        names: list[str | None] = [name or None for name in self.grid.push_messages(messages)]
        return names or [None] * len(messages)

    def receive(self, names: Collection[str]) -> list[tuple[str, Parcel | str]]:
        """Pulls what has come."""
        found: list[tuple[str, Parcel | str]] = []
        for reply in self.grid.pull_messages(list(names)) if names else []:
            name = reply.metadata.reply_to_message_id
            if reply.has_error():
                found.append((name, f"{reply.error.reason} (Flower's error {reply.error.code})"))
                continue
            try:
                found.append((name, from_record(reply.content)))
            except InputError as error:
                found.append((name, Parcel({"refused": str(error)})))
        return found


class FlowerBackend(Federation):
    """A federation over a Flower grid; the arguments are those of :class:`mixfed.backends.federation.Federation`."""

    def __init__(self, grid: Grid, experiment: str, terms: Terms | None = None, **options: Any) -> None:
        super().__init__(GridPost(grid), experiment, terms, **options)
