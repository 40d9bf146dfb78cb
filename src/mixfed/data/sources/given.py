"""A source that is a function of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mixfed.data.sources.base import Examples, Source
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError, explained

PARTS = ("clients", "central", "test")


def called(load: Callable[..., Any], name: str, folder: str | Path | None, options: Mapping[str, Any]) -> Any:
    """What the function returns; it gets the data folder, if it has a parameter ``folder``, and the options."""
    place = {"folder": Path(folder or ".")} if "folder" in inspect.signature(load).parameters else {}
    with explained(f"The source '{name}' fails"):
        try:
            return load(**place, **options)
        except (TypeError, OSError) as error:
            raise InputError(f"The source '{name}' fails: {str(error).rstrip('.')}.") from error


def as_source(found: Any, name: str) -> Source:
    """The source that a function returned: a :class:`Source`, or a dictionary with ``clients`` (FederatedData) and
    perhaps, as CentralData, ``central`` and ``test``."""
    if isinstance(found, Source):
        return found
    if not isinstance(found, Mapping) or "clients" not in found or found.keys() - set(PARTS):
        told = ", ".join(map(str, found)) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise InputError(
            f"The source '{name}' returns a dictionary with clients, and perhaps central and test, not {told}."
        )
    for part in PARTS:
        wanted = FederatedData if part == "clients" else CentralData
        if found.get(part) is not None and not isinstance(found[part], wanted):
            raise InputError(
                f"The source '{name}' gives {part} as a {type(found[part]).__name__}; make it a {wanted.__name__}."
            )
    return _source(found, name)


def _source(found: Mapping[str, Any], name: str) -> Source:
    clients, central, test = (found.get(part) for part in PARTS)
    assert isinstance(clients, FederatedData)
    people = clients.owners() if clients.names is None else clients.names[clients.owners()]
    labels = [data.arrays["y"] for data in (clients, central, test) if data is not None and "y" in data.arrays]
    whole = bool(labels) and all(y.dtype.kind in "iu" and len(y) and y.min() >= 0 for y in labels)
    return Source(
        train=clients.arrays,
        test={n: x[:0] for n, x in clients.arrays.items()} if test is None else test.arrays,
        prepare=clients.prepare,
        classes=1 + max(int(np.max(y)) for y in labels) if whole else None,
        natural_clients={"train": people, "test": people[:0]},
        description=f"what {name} returns",
        licence="",
        centre=None if central is None else Examples(central.arrays, None),
    )
