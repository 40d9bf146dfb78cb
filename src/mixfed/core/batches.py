"""How examples become batches: a plan of row numbers for a whole cohort, and the tensors gathered from it.

A client's examples are a stream of epochs, each shuffled anew and cut into batches of B (the last one may be
smaller). A round takes the first K batches of that stream, or E whole epochs. The plan of a cohort is one array
[clients, steps, batch] of row numbers with a count for each batch; the examples themselves are gathered later, chunk
by chunk, so that a round's memory follows the chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfed import rng
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError, require_memory
from mixfed.ranges import Count, CountOrNone, PartOfOne, within_ranges

if TYPE_CHECKING:
    from mixfed.core.train import Kernel


@within_ranges()
@dataclass(frozen=True)
class Batching:
    """B examples a step (0: all of them), for K ``steps`` or E ``epochs``; exactly one of the two is given."""

    batch_size: CountOrNone
    steps: Count | None = None
    epochs: Count | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise InputError("Give either the number of local steps or the number of local epochs, not both or none.")


@within_ranges()
@dataclass(frozen=True)
class Sample:
    """Examples of a central source that each client receives and mixes into its own for one round.

    Either ``count`` examples, or as many as make them the share ``ratio`` of the mixed examples: r/(1 − r)·nᵢ.
    """

    source: str
    ratio: PartOfOne | None = None
    count: CountOrNone | None = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.count is None):
            raise InputError("Example transfer takes either a mixing ratio or a number of examples.")

    def sizes(self, own: NDArray[np.int64], available: int) -> NDArray[np.int64]:
        """How many central examples each client receives, given how many it has."""
        if self.count is not None:
            wanted = np.full_like(own, self.count)
        else:
            ratio = self.ratio or 0.0
            wanted = np.rint(own * ratio / (1 - ratio)).astype(np.int64)
        return np.minimum(wanted, available)


@dataclass
class Memory:
    """What an optimizer ``kept`` of earlier rounds, by the number of the move; training puts its own in its place."""

    kept: dict[str, Any]


@dataclass(frozen=True)
class Batches:
    """What one client (or the centre) trains on in a round: fields [steps, batch, …].

    Under vmap the tensors stand for a whole chunk of clients: ``mask`` [steps, batch] marks the real examples and
    ``active`` [steps] the real steps, where clients differ. Without vmap, ``counts`` trims the padding instead.
    ``kernel`` is a better way to train on these batches, where somebody knows one (:class:`mixfed.core.train.Kernel`),
    and ``extra`` has numbers of each client that it needs. ``memory`` is what the optimizer remembers of earlier
    rounds, where it does.
    """

    source: str
    fields: Batch
    key: Tensor
    steps: Tensor
    examples: Tensor
    counts: tuple[int, ...] = ()
    mask: Tensor | None = None
    active: Tensor | None = None
    vectorised: bool = False
    kernel: Kernel | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Memory | None = None

    @classmethod
    def without_data(cls, steps: int, device: torch.device | str = "cpu") -> Batches:
        """Empty batches: steps of a loss that is a function of the parameters alone."""
        zero = torch.zeros((), device=device)
        return cls("", {}, torch.zeros((), dtype=torch.int64, device=device), zero + steps, zero, (0,) * steps)

    @property
    def length(self) -> int:
        """How many steps the loop over these batches takes."""
        return len(self.counts) if not self.vectorised else int(next(iter(self.fields.values())).shape[0])

    def first(self, examples: int) -> Batches:
        """One step on this many examples (the first one, repeated), for measuring what a step costs."""
        fields = {n: x[:1, :1].repeat_interleave(examples, dim=1) for n, x in self.fields.items()}
        one = torch.ones_like(self.steps)
        return replace(self, fields=fields, steps=one, examples=one * examples, counts=(examples,))

    def __iter__(self) -> Iterator[tuple[Batch, Tensor | None]]:
        """The batches in order, each with the flag that says whether its step counts (None: it does)."""
        if self.vectorised:
            columns = self.fields if self.mask is None else self.fields | {"mask": self.mask}
            steps = {name: x.unbind() for name, x in columns.items()}
        for k in range(self.length):
            if self.vectorised:
                batch = {name: x[k] for name, x in steps.items()}
            else:
                batch = {name: x[k, : self.counts[k]] for name, x in self.fields.items()}
            batch["key"] = self.key + rng.signed(k * _STEP_KEY) if k else self.key
            yield batch, None if self.active is None else self.active[k]


_STEP_KEY = 0x632BE59BD9B4E019


@dataclass(frozen=True)
class Plan:
    """The row numbers of a cohort's batches: ``rows`` [clients, steps, batch], ``counts`` [clients, steps].

    Rows beyond the clients' own data are rows of ``extra``: central examples that were sent to the clients.
    """

    source: str
    data: FederatedData | CentralData
    clients: NDArray[np.int64]
    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    keys: NDArray[np.int64]
    extra: CentralData | None = None
    extra_examples: int = 0

    def __len__(self) -> int:
        return len(self.clients)

    def first_clients(self, count: int) -> Plan:
        """The same plan for the first few clients of the cohort."""
        return self.stretch(slice(0, count))

    def stretch(self, few: slice) -> Plan:
        """The same plan for some clients of the cohort that follow each other."""
        return replace(
            self, clients=self.clients[few], rows=self.rows[few], counts=self.counts[few], keys=self.keys[few]
        )

    @property
    def steps(self) -> NDArray[np.int64]:
        """K_i: the steps of each client."""
        return np.asarray((self.counts > 0).sum(axis=1), dtype=np.int64)

    @property
    def examples(self) -> NDArray[np.int64]:
        """p_i: the examples that each client processes."""
        return np.asarray(self.counts.sum(axis=1), dtype=np.int64)

    def bytes_per_client(self) -> int:
        """What one client's gathered batches weigh."""
        return int(np.prod(self.rows.shape[1:])) * _row_bytes(self.data)

    def bytes_of_extra(self) -> int:
        """What the central examples weigh that were sent to the cohort."""
        return self.extra_examples * _row_bytes(self.extra) if self.extra else 0

    def client(self, i: int, device: torch.device | str = "cpu") -> Batches:
        """The batches of the i-th client of the cohort, without padding."""
        counts = tuple(int(c) for c in self.counts[i] if c > 0)
        return Batches(
            source=self.source,
            fields=self._gather(self.rows[i, : len(counts)], device),
            key=torch.tensor(int(self.keys[i]), device=device),
            steps=torch.tensor(float(len(counts)), device=device),
            examples=torch.tensor(float(sum(counts)), device=device),
            counts=counts,
        )

    def chunk(self, chosen: slice, device: torch.device | str = "cpu") -> Batches:
        """The batches of several clients, padded, with a first dimension over clients (to be vmapped over).

        In memory the first dimension is over steps, so that what all clients do at a step is side by side.
        """
        counts, rows = self.counts[chosen], self.rows[chosen]
        real_steps = counts > 0
        length = max(int(real_steps.sum(axis=1).max()), 1)
        counts, rows, real_steps = counts[:, :length], rows[:, :length], real_steps[:, :length]
        size = rows.shape[2]
        ragged = bool((counts < size).any())
        mask = torch.from_numpy(np.arange(size) < counts[:, :, None]).to(device) if ragged else None
        active = torch.from_numpy(real_steps.copy()).to(device) if not real_steps.all() else None
        return Batches(
            source=self.source,
            fields={n: x.movedim(0, 1) for n, x in self._gather(rows.swapaxes(0, 1), device).items()},
            key=torch.from_numpy(self.keys[chosen].copy()).to(device),
            steps=torch.from_numpy(self.steps[chosen].astype(np.float32)).to(device),
            examples=torch.from_numpy(self.examples[chosen].astype(np.float32)).to(device),
            mask=mask,
            active=active,
            vectorised=True,
        )

    def _gather(self, rows: NDArray[np.int64], device: torch.device | str) -> Batch:
        if self.extra is None:
            return gather(self.data, rows, device)
        last = _row_count(self.data)
        own = rows < last
        ours = gather(self.data, np.where(own, rows, 0), device)
        theirs = gather(self.extra, np.where(own, 0, rows - last), device)
        chosen = torch.from_numpy(own).to(device)
        return {
            n: torch.where(chosen.view(*own.shape, *(1,) * (x.ndim - own.ndim)), x, theirs[n]) for n, x in ours.items()
        }


def gather(data: FederatedData | CentralData, rows: NDArray[np.int64], device: torch.device | str = "cpu") -> Batch:
    """The examples with these row numbers, in the shape of ``rows``, prepared as the data says."""
    fields = {}
    for name, array in data.arrays.items():
        fields[name] = _taken(array, rows.reshape(-1)).view(*rows.shape, *array.shape[1:]).to(device)
    return data.prepare(fields) if data.prepare else fields


_BY_TORCH = (np.float32, np.float64, np.int64, np.uint8)


def _taken(array: NDArray[Any], rows: NDArray[np.int64]) -> Tensor:
    """The rows of an array. PyTorch takes them in all cores of an operator, from memory that it may write to.

    The array may be a part of another one, such as some columns, all of which ``np.take`` would copy first.
    """
    steps_forward = all(stride > 0 and stride % array.itemsize == 0 for stride in array.strides)
    if array.flags.writeable and steps_forward and array.dtype in _BY_TORCH:
        return torch.from_numpy(array).index_select(0, torch.from_numpy(rows))
    return torch.from_numpy(np.take(array, rows, axis=0) if array.flags.c_contiguous else array[rows])


def plan_cohort(
    source: str,
    data: FederatedData,
    clients: NDArray[np.int64],
    batching: Batching,
    seed: int,
    round: int | NDArray[np.int64],
    sample: Sample | None = None,
    central: CentralData | None = None,
) -> Plan:
    """Batches for the clients of a round; each client's depend only on (seed, source, round, client).

    Clients of several rounds have a ``round`` each.

    With a ``sample`` of ``central`` data, every client's examples of this round are its own and its sample, shuffled
    together (Augenstein et al., 2021, Algorithm 3).
    """
    keys = _client_keys(source, clients, seed, round)
    first, own = data.offsets[clients], data.sizes(clients)
    if (own == 0).any():
        raise InputError(f"Client {int(clients[np.argmin(own)])} of '{source}' has no examples.")
    received = np.zeros_like(own) if sample is None or central is None else sample.sizes(own, len(central))
    place, counts = _places(own + received, batching, keys)
    if sample is None or central is None:
        return Plan(source, data, clients, first[:, None, None] + place, counts, keys)
    starts = np.concatenate([[0], np.cumsum(received)])
    drawn = [
        drawn_for(source, int(client), seed, int(one), int(count), len(central))
        for one, client, count in zip(np.broadcast_to(round, clients.shape), clients, received, strict=True)
    ]
    pool = np.concatenate([*drawn, [0]])
    beyond = place - own[:, None, None]
    theirs = data.examples + pool[np.where(beyond >= 0, starts[:-1, None, None] + beyond, -1)]
    rows = np.where(beyond < 0, first[:, None, None] + place, theirs)
    return Plan(source, data, clients, rows, counts, keys, central, int(received.sum()))


def plan_devices(
    source: str,
    data: FederatedData,
    clients: Sequence[int],
    batching: Batching,
    seed: int,
    round: int,
    received: CentralData | None = None,
    counts: Sequence[int] | None = None,
) -> Plan:
    """The same batches for clients on their devices, where they have these numbers in the population.

    ``data`` are all of theirs, in that order. Of the examples ``received``, the first client has so many as ``counts``
    begins with, and so on.
    """
    numbers, places = np.asarray(clients, np.int64), np.arange(len(clients))
    keys = _client_keys(source, numbers, seed, round)
    first, own = data.offsets[places], data.sizes(places)
    if (own == 0).any():
        raise InputError(f"Client {int(numbers[np.argmin(own)])} of '{source}' has no examples.")
    more = np.zeros_like(own) if counts is None else np.asarray(counts, np.int64)
    place, real = _places(own + more, batching, keys)
    beyond = place - own[:, None, None]
    theirs = data.examples + (np.cumsum(more) - more)[:, None, None] + beyond
    rows = np.where(beyond < 0, first[:, None, None] + place, theirs)
    return Plan(source, data, numbers, rows, real, keys, received if more.any() else None, int(more.sum()))


def drawn_for(source: str, client: int, seed: int, round: int, count: int, available: int) -> NDArray[np.int64]:
    """Which central examples a client receives in this round."""
    return rng.generator(seed, f"transfer/{source}", round, client).choice(available, count, replace=False)


def _client_keys(
    source: str, clients: NDArray[np.int64], seed: int, rounds: int | NDArray[np.int64]
) -> NDArray[np.int64]:
    """What a client's shuffles and masks of a round are drawn from."""
    of_source = rng.key(0, source)
    if isinstance(rounds, int):
        return (rng.bits(rng.key(seed, "batches", rounds) ^ of_source, clients) >> np.uint64(1)).astype(np.int64)
    each, which = np.unique(rounds, return_inverse=True)
    of_round = np.array([rng.key(seed, "batches", one) ^ of_source for one in each.tolist()], np.int64)[which]
    return (rng.bits(of_round, clients) >> np.uint64(1)).astype(np.int64)


def plan_central(source: str, data: CentralData, batching: Batching, seed: int, round: int, step: int = 0) -> Plan:
    """Batches for the centre, drawn from all its examples as if it were one client.

    The stream of epochs goes on from round to round, so that K steps a round still visit every example equally often.
    Where the server makes several steps in a round, the first, the second … of every round have a stream each.
    """
    n = len(data)
    if n == 0:
        raise InputError(f"The central data '{source}' is empty.")
    key = rng.key(seed, "batches", step) ^ rng.key(0, source)
    size = min(batching.batch_size or n, n)
    per_epoch = -(-n // size)
    steps = batching.steps if batching.steps is not None else (batching.epochs or 1) * per_epoch
    require_memory("The list of the centre's batches", 8 * steps * size, "take fewer steps or epochs")
    number = round * steps + np.arange(steps)
    rows = np.zeros((steps, size), dtype=np.int64)
    counts = np.minimum(n - (number % per_epoch) * size, size)
    for epoch in np.unique(number // per_epoch):
        order = np.argsort(rng.bits(key, np.arange(n) + (int(epoch) << 32))) if batching.shuffle else np.arange(n)
        for k in np.flatnonzero(number // per_epoch == epoch):
            start = int(number[k] % per_epoch) * size
            rows[k, : counts[k]] = order[start : start + size]
    keys = (rng.bits(key, np.array([round])) >> np.uint64(1)).astype(np.int64)
    return Plan(source, data, np.zeros(1, dtype=np.int64), rows[None], counts[None].astype(np.int64), keys)


def _row_bytes(data: FederatedData | CentralData) -> int:
    return max(sum(a.itemsize * int(np.prod(a.shape[1:])) for a in data.arrays.values()), 1)


def _row_count(data: FederatedData | CentralData) -> int:
    return data.examples if isinstance(data, FederatedData) else len(data)


def _places(
    sizes: NDArray[np.int64], batching: Batching, keys: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of its own examples (0..size−1) each client takes at each step, and how many of a batch are real."""
    batch = batching.batch_size or int(sizes.max())
    per_epoch = -(-sizes // batch)
    width = min(batch, int(sizes.max()))
    most = batching.steps if batching.steps is not None else int(per_epoch.max()) * (batching.epochs or 1)
    require_memory("The list of a round's batches", 8 * len(sizes) * most * width, "take fewer steps or epochs")
    steps = np.full_like(sizes, batching.steps) if batching.steps is not None else per_epoch * (batching.epochs or 1)
    step = np.arange(int(steps.max()))
    epoch, position = step // per_epoch[:, None], (step % per_epoch[:, None]) * batch
    counts = np.where(step < steps[:, None], np.minimum(sizes[:, None] - position, batch), 0)
    place = np.minimum(position[:, :, None] + np.arange(width), sizes[:, None, None] - 1)
    if batching.shuffle:
        epochs = -(-steps // per_epoch)
        epoch = np.minimum(epoch, epochs[:, None] - 1)
        order, start = _shuffled(sizes, epochs, keys)
        place = order[start[:, None, None] + (epoch * sizes[:, None])[:, :, None] + place]
    return place, counts


def _shuffled(
    sizes: NDArray[np.int64], epochs: NDArray[np.int64], keys: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Random orders of 0..size−1 for every (client, epoch), end to end, and where each client's begin.

    Every (client, epoch) is a segment; sorting (segment, random bits) shuffles all of them in one go.
    """
    lengths = np.repeat(sizes, epochs)
    owner = np.repeat(np.arange(len(sizes)), epochs)
    first = np.concatenate([[0], np.cumsum(lengths)])
    segment = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(first[-1]) - first[segment]
    epoch = np.arange(len(lengths)) - (np.cumsum(epochs) - epochs)[owner]
    random = rng.bits(keys[owner][segment], within + (epoch[segment] << 32))
    spare = np.uint64(max(len(lengths).bit_length(), 1))
    order = np.argsort((segment.astype(np.uint64) << (np.uint64(64) - spare)) | (random >> spare), kind="stable")
    client_start = np.concatenate([[0], np.cumsum(sizes * epochs)[:-1]])
    return within[order], client_start.astype(np.int64)
