"""Ways to deal examples to clients: plain functions that return one array of row numbers per client.

Every example goes to exactly one client and no client is left empty. All label skews are one idea: a table of
how many examples of each class each client gets, after which the examples of a class are dealt at random.
Use the result with :meth:`mixfed.data.FederatedData.from_groups`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mixfed.data._arrays import Rows, as_keys, groups_of, offsets_of, whole_numbers
from mixfed.errors import InputError
from mixfed.ranges import Count, Positive, Rule, within_ranges
from mixfed.rng import generator

Table = NDArray[np.int64]


@within_ranges()
def iid(n: int, clients: Count, seed: int) -> list[Rows]:
    """Deal ``n`` examples at random, evenly: sizes differ by one at most."""
    _require_enough(n, clients, 1)
    owners = np.arange(n) * clients // n
    return _groups(generator(seed, "partition/iid").permutation(owners), clients)


def by_key(keys: ArrayLike) -> list[Rows]:
    """One client per distinct key (writer, user, …), in the order of the keys."""
    _, owners, sizes = np.unique(_flat(keys, "keys"), return_inverse=True, return_counts=True)
    return _groups(owners, len(sizes))


@within_ranges(
    Rule(
        "quantity_skew needs one of alpha (Dirichlet) and sigma (log-normal); give exactly one",
        lambda alpha, sigma: (alpha is None) != (sigma is None),
    )
)
def quantity_skew(
    n: int,
    clients: Count,
    *,
    seed: int,
    alpha: Positive | None = None,
    sigma: Positive | None = None,
    min_size: Count = 1,
) -> list[Rows]:
    """Deal at random, unevenly: shares drawn from a Dirichlet(``alpha``) or log-normal(``sigma``) distribution.

    Small ``alpha`` or large ``sigma`` make a few clients large. What exceeds ``min_size`` each is shared out so.
    """
    _require_enough(n, clients, min_size)
    random = generator(seed, "partition/quantity_skew")
    if sigma is not None:
        logs = random.normal(size=clients) * sigma
    else:
        assert alpha is not None  # by the rule above
        logs = _log_gamma(alpha, (clients,), random)
    weights = np.exp(logs - logs.max())
    sizes = min_size + _round_shares((n - clients * min_size) * weights / weights.sum(), random)
    return _groups(random.permutation(np.repeat(np.arange(clients), sizes)), clients)


@within_ranges()
def shards(labels: ArrayLike, clients: Count, classes_per_client: Count, seed: int) -> list[Rows]:
    """Give every client exactly ``classes_per_client`` classes, and share each class evenly among its holders.

    Every class has about the same number of holders, the most numerous ones one more where it does not come out.
    """
    classes, counts = _classes(labels)
    _require_enough(len(classes), clients, 1)
    if not 1 <= classes_per_client <= len(counts):
        raise InputError(f"there are {len(counts)} classes; classes_per_client must be 1 to {len(counts)}")
    slots = clients * classes_per_client
    if slots < len(counts):
        told = f"{clients} clients with {classes_per_client} classes each cannot hold all {len(counts)} classes"
        raise InputError(f"{told}; raise either number")
    holders = np.full(len(counts), slots // len(counts))
    holders[np.argsort(-counts, kind="stable")[: slots % len(counts)]] += 1
    short = np.flatnonzero(counts < holders)
    if len(short):
        told = f"a class has {counts[short[0]]} examples but {holders[short[0]]} clients to hold it"
        raise InputError(f"{told}; lower clients or classes_per_client")
    random = generator(seed, "partition/shards")
    table = np.zeros((clients, len(counts)), np.int64)
    left = holders.copy()
    for client in range(clients):  # the classes with most places left, ties at random: this never runs dry
        chosen = np.lexsort((random.random(len(left)), -left))[:classes_per_client]
        table[client, chosen] = 1
        left[chosen] -= 1
    for number, count in enumerate(counts):
        holding = np.flatnonzero(table[:, number])
        table[holding, number] = np.diff(np.arange(len(holding) + 1) * count // len(holding))
    return _deal(classes, table, random)


@within_ranges()
def dirichlet(
    labels: ArrayLike,
    clients: Count,
    alpha: Positive,
    seed: int,
    min_size: Count = 1,
    sizes: ArrayLike | None = None,
) -> list[Rows]:
    """Skewed labels: independent Gamma(``alpha``) weights for every client and class, scaled to use all examples.

    Small ``alpha`` gives clients few classes, large ``alpha`` nearly the same mixture to all. Without ``sizes``
    every class is divided among the clients by a Dirichlet(``alpha``) draw, so client sizes vary as well; clients
    below ``min_size`` then take examples from the largest. With ``sizes`` every client's own label distribution
    is a Dirichlet(``alpha``) draw, adjusted as little as possible (in relative entropy) for the classes to be
    used up exactly.
    """
    classes, counts = _classes(labels)
    _require_enough(len(classes), clients, min_size)
    random = generator(seed, "partition/dirichlet")
    logs = _log_gamma(alpha, (clients, len(counts)), random)
    if sizes is None:
        weights = np.exp(logs - logs.max(axis=0))
        table = _round_shares(counts * weights / weights.sum(axis=0), random)
        _raise_to(table, min_size)
    else:
        wanted = whole_numbers(sizes, "sizes")
        if wanted.shape != (clients,) or wanted.sum() != len(classes) or wanted.min() < min_size:
            told = f"sizes must be {clients} numbers of at least {min_size} that sum to {len(classes)}"
            raise InputError(f"{told}, but they are {len(wanted)} that sum to {wanted.sum()}")
        weights = np.exp(logs - logs.max(axis=1, keepdims=True)) + 1e-9
        table = _round_table(_fit(weights, wanted, counts), wanted, counts, random)
    return _deal(classes, table, random)


def label_split(
    labels: ArrayLike, client_labels: ArrayLike, seed: int = 0, inside: float = 1.0, outside: float = 0.0
) -> tuple[Rows, Rows]:
    """(client rows, central rows): the labels that live on clients, and all others at the centre.

    For overlap, ``inside`` is the fraction of each client label that clients hold, ``outside`` that of each other.
    """
    values = _flat(labels, "labels")
    wanted = np.unique(_flat(client_labels, "client_labels"))
    missing = wanted[~np.isin(wanted, values)]
    if len(missing):
        raise InputError(f"no example has label {missing[0]}; choose client_labels among the labels in the data")
    if not (0 <= inside <= 1 and 0 <= outside <= 1):
        raise InputError(f"inside {inside} and outside {outside} must be fractions from 0 to 1")
    random = generator(seed, "partition/label_split")
    held = np.zeros(len(values), np.bool_)
    for label in np.unique(values):
        rows = random.permutation(np.flatnonzero(values == label))
        held[rows[: round(len(rows) * (inside if label in wanted else outside))]] = True
    if held.all() or not held.any():
        side = "centre" if held.all() else "clients"
        raise InputError(f"the {side} would hold no example; change client_labels, inside or outside")
    return np.flatnonzero(held), np.flatnonzero(~held)


def _groups(owners: NDArray[np.int64], clients: int) -> list[Rows]:
    """Rows of every client, ascending, from the client of every row."""
    return groups_of(np.argsort(owners, kind="stable"), offsets_of(np.bincount(owners, minlength=clients)))


def _deal(classes: NDArray[np.int64], table: Table, random: np.random.Generator) -> list[Rows]:
    """Deal the examples of each class at random so that every client gets what the table says."""
    clients = np.arange(len(table))
    owners = np.empty(len(classes), np.int64)
    for number in range(table.shape[1]):
        owners[random.permutation(np.flatnonzero(classes == number))] = np.repeat(clients, table[:, number])
    return _groups(owners, len(table))


def _round_shares(shares: NDArray[np.float64], random: np.random.Generator) -> Table:
    """Whole numbers near ``shares`` (up or down at random, unbiased) with the same, whole, sums along axis 0."""
    totals = np.rint(shares.sum(axis=0)).astype(np.int64)
    ends = np.floor(np.cumsum(shares, axis=0) + random.random(shares.shape[1:])).astype(np.int64)
    ends[-1] = totals
    whole: Table = np.diff(np.minimum(ends, totals), axis=0, prepend=0)
    return whole


def _fit(weights: NDArray[np.float64], rows: Table, columns: Table) -> NDArray[np.float64]:
    """Scale rows and columns in turn until both have the asked sums (Sinkhorn), then shrink so that none exceeds."""
    table = weights
    for _ in range(1000):
        table = table * (columns / table.sum(axis=0))
        table = table * (rows / table.sum(axis=1))[:, None]
        if np.abs(table.sum(axis=0) - columns).max() < 1e-3:
            break
    fitted: NDArray[np.float64] = table / np.maximum(1, table.sum(axis=0) / columns)
    return fitted


def _round_table(table: NDArray[np.float64], rows: Table, columns: Table, random: np.random.Generator) -> Table:
    """Whole numbers near ``table`` with exactly the given row and column sums."""
    whole = np.floor(table * (1 - 1e-12)).astype(np.int64)
    fraction = np.maximum(table - whole, 1e-12)
    need, spare = rows - whole.sum(axis=1), columns - whole.sum(axis=0)
    needs, spares = need.tolist(), spare.tolist()
    for cell in np.argsort(random.exponential(size=fraction.size) / fraction.ravel()).tolist():
        row, column = divmod(cell, table.shape[1])
        if needs[row] and spares[column]:
            whole[row, column] += 1
            needs[row] -= 1
            spares[column] -= 1
    last = random.permutation(np.repeat(np.arange(len(spares)), spares))
    np.add.at(whole, (np.repeat(np.arange(len(needs)), needs), last), 1)
    return whole


def _raise_to(table: Table, least: int) -> None:
    """Bring every client up to ``least`` examples, taken from the largest class of the largest client."""
    sizes = table.sum(axis=1)
    for client in np.flatnonzero(sizes < least):
        while sizes[client] < least:
            giver = int(np.argmax(sizes))
            number = int(np.argmax(table[giver]))
            moved = int(min(least - sizes[client], sizes[giver] - least, table[giver, number]))
            for place, change in ((giver, -moved), (client, moved)):
                table[place, number] += change
                sizes[place] += change


def _log_gamma(alpha: float, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float64]:
    """Logarithms of Gamma(alpha) draws, which do not underflow where alpha is tiny."""
    return np.log(random.gamma(alpha + 1, size=shape)) - random.exponential(size=shape) / alpha


def _classes(labels: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels as 0, 1, …, and how many examples each has."""
    _, classes, counts = np.unique(_flat(labels, "labels"), return_inverse=True, return_counts=True)
    return classes.astype(np.int64), counts.astype(np.int64)


def _flat(values: ArrayLike, what: str) -> NDArray[np.int64]:
    array = as_keys(values, what)
    if array.ndim != 1 or not array.size:
        raise InputError(f"{what} has shape {array.shape}; give a flat list with one entry per example")
    return array


def _require_enough(n: int, clients: int, least: int) -> None:
    if n < clients * least:
        raise InputError(f"{n} examples are too few for {clients} clients with at least {least} each; ask for fewer")
