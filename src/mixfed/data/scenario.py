"""Who holds what in an experiment: a source's examples dealt to clients, the centre and the test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.data import partition
from mixfed.data._arrays import Rows, join, take
from mixfed.data.meaning import Meaning
from mixfed.data.scaling import Scaling
from mixfed.data.sources import Examples, Source
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.ranges import Count, within_ranges
from mixfed.rng import generator

GIVEN_BY_DATA = ("n", "labels", "keys", "seed", "sizes")
"""Parameters of partitioners that come from the data or the run, not from a recipe."""


@within_ranges()
def natural(keys: NDArray[Any], seed: int, group: Count = 1) -> list[Rows]:
    """One client per person (user, writer, …), or per ``group`` of them put together at random."""
    people, owners = np.unique(keys, return_inverse=True)
    if group == 1:
        return partition.by_key(owners)
    place = np.empty(len(people), np.int64)
    place[generator(seed, "partition/natural").permutation(len(people))] = np.arange(len(people))
    clients = max(len(people) // group, 1)
    return partition.by_key(np.minimum(place // group, clients - 1)[owners])


PARTITIONS: dict[str, Callable[..., list[Rows]]] = {
    "iid": partition.iid,
    "dirichlet": partition.dirichlet,
    "shards": partition.shards,
    "quantity_skew": partition.quantity_skew,
    "natural": natural,
}


@dataclass(frozen=True)
class Scenario:
    """The data of one run.

    ``like_clients`` says of every "test" and "validation" example whether it is of the kind that clients hold,
    where they and the centre hold different kinds. ``own`` has every client's own "test" and "validation" examples,
    ``of_centre`` what the centre keeps apart of its own to tune on. ``scaling`` is what normalised all examples.
    """

    clients: FederatedData
    central: CentralData | None
    test: CentralData
    validation: CentralData | None
    source: Source
    like_clients: dict[str, NDArray[np.bool_] | None] = field(default_factory=dict)
    own: dict[str, FederatedData] = field(default_factory=dict)
    of_centre: CentralData | None = None
    scaling: Scaling | None = None

    def learnt(self) -> dict[str, Any]:
        """What was learnt from training files about how to read others: the encoding, and the scaling if there is one.

        :func:`mixfed.data.again.read_like` reads a file by it.
        """
        encoding = None if self.source.encoding is None else self.source.encoding.to_json()
        return {"encoding": encoding, "scaling": self.scaling and self.scaling.to_json()}

    def meaning(self) -> Meaning:
        """What labels stand for, and with them a model's answers."""
        names, scaled = self.source.names.get("y", ()), self.scaling
        labels = self.clients.arrays.get("y")
        classes = self.source.classes if labels is not None and labels.ndim == 1 else None
        if scaled is None or "y" not in scaled.mean:
            return Meaning(classes, names)
        return Meaning(classes, names, float(scaled.mean["y"]), float(scaled.deviation["y"]))

    @classmethod
    def of(
        cls, clients: FederatedData, test: CentralData, central: CentralData | None = None, classes: int | None = None
    ) -> Scenario:
        """A scenario of data at hand; without ``classes`` there are as many as the largest label says."""
        labels = test.arrays.get("y")
        if classes is None and labels is not None and labels.dtype.kind in "iu" and labels.size:
            classes = int(labels.max()) + 1
        source = Source(clients.arrays, test.arrays, clients.prepare, classes, None, "data of the user's own", "")
        return cls(clients, central, test, None, source)

    def part(self, on: str, name: str) -> CentralData:
        """Of the "test", "validation" or "centre" examples: all, those of the clients' kind, or of the centre's."""
        data = {"test": self.test, "validation": self.validation, "centre": self.of_centre}[on]
        if data is None:
            whose = "the centre's examples" if on == "centre" else "the examples"
            raise InputError(f"There is no {on} part to evaluate on; keep a share of {whose} apart for validation.")
        if name == "all":
            return data
        mask = self.like_clients.get(on)
        if mask is None:
            raise InputError(
                f"Clients and centre do not hold different kinds of examples, so there is no evaluation set '{name}'."
            )
        chosen = mask if name == "clients" else ~mask
        if not chosen.any():
            raise InputError(f"No {on} example is like those of the {name}; do not evaluate on it.")
        return data.select(chosen)


def apart(
    sides: Sequence[Examples], share: float, purpose: str, whole_people: bool
) -> tuple[list[Examples], list[Examples]]:
    """(rest, set apart), side by side: a share of the examples, or of the people with all that is theirs.

    The draw is the same for every seed of a run, so that all runs are measured on the same examples. The first side is
    the clients'. Where nothing is known of whose the others are, a share of their examples is set apart.
    """
    whole = [whole_people and (side is sides[0] or side.people is not None) for side in sides]
    rest, kept = zip(*(_apart(s, share, purpose, people) for s, people in zip(sides, whole, strict=True)), strict=True)
    return list(rest), list(kept)


def _apart(examples: Examples, share: float, purpose: str, whole_people: bool) -> tuple[Examples, Examples]:
    if not 0 < share < 1:
        raise InputError(f"The share of examples to set apart for {purpose} must be between 0 and 1, not {share}.")
    unit = examples.people if whole_people else np.arange(len(examples))
    if unit is None:
        raise InputError("This source does not say which person an example is of, so no people can be held out.")
    units, owners = np.unique(unit, return_inverse=True)
    chosen = np.zeros(len(units), np.bool_)
    chosen[generator(0, f"scenario/{purpose}").permutation(len(units))[: round(share * len(units))]] = True
    apart = chosen[owners]
    if apart.all() or not apart.any():
        raise InputError(f"A share of {share} of {len(units)} for {purpose} leaves one side without examples.")
    return examples.rows(np.flatnonzero(~apart)), examples.rows(np.flatnonzero(apart))


def deal(
    examples: Examples, kind: str, options: dict[str, Any], seed: int, prepare: Any, by: str = "y"
) -> FederatedData:
    """The examples on clients, by one of :data:`PARTITIONS`; where it goes by labels, they are in the field ``by``."""
    given: dict[str, Any] = dict(options)
    wanted = _parameters_of(kind)
    if "n" in wanted:
        given["n"] = len(examples)
    if "labels" in wanted:
        if by not in examples.arrays or examples.arrays[by].ndim != 1:
            fields = ", ".join(name for name, values in examples.arrays.items() if values.ndim == 1)
            raise InputError(f"The examples have no labels '{by}' to deal them by; they have {fields}.")
        given["labels"] = examples.arrays[by]
    if "keys" in wanted:
        if examples.people is None:
            raise InputError("This source has no natural clients; choose another partition.")
        given["keys"] = examples.people
    missing = [name for name, needed in wanted.items() if needed and name not in given and name != "seed"]
    if missing:
        raise InputError(f"The partition '{kind}' needs '{missing[0]}'; give it a value.")
    dealt = FederatedData.from_groups(examples.arrays, PARTITIONS[kind](**given, seed=seed), prepare)
    if kind == "natural" and given.get("group", 1) == 1:
        return replace(dealt, names=np.unique(given["keys"]))
    return dealt


def with_label_noise(clients: FederatedData, share: float, classes: int | None, seed: int) -> FederatedData:
    """The clients with a share of their examples, drawn at random, whose label is drawn at random from all classes."""
    if not share:
        return clients
    if not 0 < share <= 1 or classes is None:
        raise InputError(f"Label noise is a share from 0 to 1 of examples that have classes, not {share}.")
    draw, labels = generator(seed, "scenario/label-noise"), clients.arrays["y"].copy()
    rows = draw.permutation(len(labels))[: round(share * len(labels))]
    labels[rows] = draw.integers(0, classes, len(rows))
    return replace(clients, arrays={**clients.arrays, "y": labels})


def keep_own(clients: FederatedData, shares: dict[str, float], seed: int) -> dict[str, FederatedData]:
    """Every client's examples as "train" and the parts that ``shares`` names, where a share is above 0."""
    wanted = {name: share for name, share in shares.items() if share}
    if not wanted:
        return {"train": clients}
    if min(wanted.values()) < 0 or sum(wanted.values()) >= 1:
        raise InputError(f"The shares of clients' own examples must be at least 0 and below 1, not {wanted}.")
    return clients.split({"train": 1 - sum(wanted.values())} | wanted, seed)


def join_device(
    parts: dict[str, FederatedData], source: Source, sizes: dict[str, int], degrees: int, seed: int
) -> dict[str, FederatedData]:
    """The parts with one more client each: the last one holds examples of the source, turned by ``degrees``."""
    joined = {}
    for name, data in parts.items():
        arrays = source.train if name == "train" else source.test
        count, available = sizes.get(name, 1), len(arrays["y"])
        if not 1 <= count <= available:
            raise InputError(f"The joining device cannot hold {count} {name} examples of the source's {available}.")
        drawn = take(arrays, np.sort(generator(seed, f"scenario/joining/{name}").choice(available, count, False)))
        if drawn["x"].ndim < 3 or drawn["x"].shape[-1] != drawn["x"].shape[-2]:
            raise InputError("Only square images can be turned, so a device joins a source of images only.")
        drawn = drawn | {"x": np.ascontiguousarray(np.rot90(drawn["x"], degrees // 90, axes=(-2, -1)))}
        offsets = np.append(data.offsets, data.offsets[-1] + count)
        joined[name] = replace(data, arrays=join([data.arrays, drawn]), offsets=offsets, names=None)
    return joined


def _parameters_of(kind: str) -> dict[str, bool]:
    found = inspect.signature(PARTITIONS[kind]).parameters.values()
    return {p.name: p.default is p.empty for p in found}
