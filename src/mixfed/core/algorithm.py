"""The nouns: what travels, what the server has at hand, and an algorithm as a value.

One round, top to bottom (see :func:`mixfed.core.loop.train`)::

    messages, state = algorithm.broadcast(state, server)              # what goes down, by population of clients
    upload, private = algorithm.client(message, private, batches)     # on every client of the cohort
    state = algorithm.step(state, replies, server)                    # what the server does with what came up
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from mixfed.core import tree
from mixfed.core.batches import Batches, Batching, Sample, plan_central
from mixfed.core.layout import images_of_steps
from mixfed.core.ledger import Ledger, count_work
from mixfed.core.model import Model
from mixfed.core.optim import Memory, Optimizer
from mixfed.core.train import LocalTrainer, Trained, gradient_of
from mixfed.core.tree import Params
from mixfed.data.store import CentralData
from mixfed.errors import InputError, explained

T = TypeVar("T")

State = dict[str, Any]
"""A tree: everything the server remembers between rounds. What is in it is checkpointed, what is not is lost."""

Private = dict[str, Params]
"""What one client keeps on its device between rounds; it is never part of a message or an upload."""

Personal = Callable[[Params, Private], Params]
"""A client's own model, from the common one and what the client keeps."""

CLIENTS = "clients"
CENTRE = "centre"
VALIDATION = "validation"


@dataclass(frozen=True)
class Message:
    """What the server sends to every client of a cohort: trees by name, and the round it belongs to.

    With ``examples`` every client also receives a fresh sample of central examples of its own. ``first`` has private
    parts for the clients that do not have them yet, and travels to those only.
    """

    payload: dict[str, Params]
    round: int
    examples: Sample | None = None
    first: Private | None = None

    def __getitem__(self, name: str) -> Params:
        return self.payload[name]

    def get(self, name: str) -> Params | None:
        """The tree of this name, or None where the message has none."""
        return self.payload.get(name)


@dataclass(frozen=True)
class Upload:
    """What a client sends up: trees by name, to be averaged with this weight (a scalar).

    Of a table in ``rows`` the values have only the rows with these ids.
    """

    values: dict[str, Params]
    weight: Tensor
    rows: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """The weighted mean of the uploads of one or more clients that started from the same version of the model.

    With ``uploads = "each"`` a reply is a single client's; with ``"sum"`` only the mean of a group ever exists.
    ``staleness`` counts the server versions that passed between sending the model and receiving this.
    Of a table in ``rows`` the values have only the rows with these (ascending) ids, and ``touched`` says which share of
    the weight belongs to clients that had the row; the mean counts the others' change of it as zero. ``message`` then
    is what these clients had been sent, whole.
    """

    values: dict[str, Params]
    weight: float
    clients: tuple[int, ...]
    source: str = CLIENTS
    staleness: int = 0
    rows: dict[str, Tensor] = field(default_factory=dict)
    touched: dict[str, Tensor] = field(default_factory=dict)
    message: Message | None = None


@dataclass
class Server:
    """What the server has at hand in a round: its own data, its randomness, and the ledger that counts its work.

    ``clients`` counts the clients of each population, ``step`` the steps that this round has had before.
    """

    round: int
    seed: int
    model: Model
    central: Mapping[str, CentralData] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    clients: Mapping[str, int] = field(default_factory=dict)
    step: int = 0

    def batches(self, batching: Batching, source: str | None = CENTRE) -> Batches:
        """This step's batches of a central source; None stands for steps of a loss that needs no data."""
        if source is None:
            return Batches.without_data(batching.steps or 1, self.model.device)
        if source not in self.central:
            raise InputError(f"This algorithm needs central data '{source}', and the run was given none.")
        plan = plan_central(source, self.central[source], batching, self.seed, self.round, self.step)
        batches = plan.client(0, self.model.device)
        return replace(batches, fields=images_of_steps(batches.fields)) if self.model.has_convolutions else batches

    def train(
        self,
        trainer: LocalTrainer,
        params: Params,
        *,
        correction: Params | None = None,
        source: str | None = CENTRE,
        want_gradient: bool = False,
    ) -> Trained:
        """K_c steps of the trainer on central data."""
        batches = self.batches(trainer.batching, source)
        with self._counted(trainer, partial(trainer.train, params), batches, "train"):
            return trainer.train(params, batches, self.round, correction=correction, want_gradient=want_gradient)

    def gradient(self, trainer: LocalTrainer, params: Params, *, source: str | None = CENTRE) -> Params:
        """∇f_c at ``params`` on one central batch."""
        batches = self.batches(replace(trainer.batching, steps=1, epochs=None), source)
        with self._counted(trainer, partial(trainer.train, params), batches, "train"):
            batch, _ = next(iter(batches))
            params = tree.cast(params, self.model.dtype)
            buffers = tree.clone({n: params[n] for n in self.model.buffers})
            return gradient_of(trainer.loss or self.model.loss, self.model.trained(params), buffers, batch)[0]

    def work(self, kind: Any, what: Callable[[Batches], T], batches: Batches) -> T:
        """Does work on central data that is not training. The ledger counts it at what a step of its ``kind`` costs."""
        with torch.no_grad(), self._counted(kind, what, batches, "work"):
            return what(batches)

    @contextmanager
    def _counted(self, kind: Any, what: Callable[[Batches], Any], batches: Batches, called: str) -> Iterator[None]:
        """Counts the work of its kind on these batches, which is done while this is active."""
        with explained(f"The centre cannot {called}" + (f" on '{batches.source}'" if batches.source else "")):
            self.ledger.count_at_server(kind, lambda n: count_work(lambda: what(batches.first(n))), batches)
            yield


def _asks_no_client(message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
    raise AssertionError("an algorithm that sends no message has no client work")


@dataclass(frozen=True)
class Lateness:
    """How an algorithm goes on when clients report late.

    ``late`` says whether updates from earlier rounds are used or discarded. ``buffer`` is how many updates make a step
    (0: all that arrived in the round). With ``steps_alone`` the server has work to do in a round in which nothing
    arrived; without it such a round changes nothing. ``same_in_every_round`` promises that what a client does depends
    on the trees of its message and not on the number of the round, so that clients of several rounds can run at once.
    """

    late: Literal["discard", "use"] = "discard"
    buffer: int = 0
    steps_alone: bool = False
    same_in_every_round: bool = False


@dataclass(frozen=True)
class OwnParts:
    """What stays on a client's device.

    ``first(params)`` is what the device holds before its first round. Where clients end up with models of their own,
    ``model(params, private)`` is a client's, from the common model and what the client keeps. ``settles`` says that a
    device which joins later learns its own part before the server takes anything from it.
    """

    first: Callable[[Params], Private] = lambda params: {}
    model: Personal | None = None
    settles: bool = False


@dataclass(frozen=True)
class RowWise:
    """Tables that travel by rows (:mod:`mixfed.transforms.rows`), with the fields of ids that index them.

    ``untouched_stay`` promises that ``step`` leaves a row of a table alone if the replies bring no change of it.
    ``in_place`` says that ``step`` writes into tensors that the last messages share, so that no client may be late.
    """

    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    untouched_stay: bool = False
    in_place: bool = False

    def __bool__(self) -> bool:
        """Whether any table travels by rows."""
        return bool(self.tables)


@dataclass(frozen=True)
class AtCentre:
    """What becomes of the server's examples.

    Of the sources in ``judged`` the model's own criterion asks the labels, so that a run looks at them before it
    begins. Those in ``guides`` teach the model nothing themselves, though their labels are the task's: they guide how
    the work of clients is put together, so that a class that no client has is not learnt.
    """

    judged: tuple[str, ...] = ()
    guides: tuple[str, ...] = ()

    @classmethod
    def of(cls, *trainers: LocalTrainer) -> AtCentre:
        """The server trains so on its one source; a loss of the trainer's own may take labels as it likes."""
        return cls((CENTRE,) if all(trainer.loss is None for trainer in trainers) else ())


Decode = Callable[[dict[str, Params]], dict[str, Params]]


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm as a value: pure functions over trees, and what they need from the run.

    ``init(params)`` is the state before the first round. ``broadcast(state, server)`` gives the message to each
    population that is asked in this round (none: an empty dictionary), and the state, which it may have changed.
    ``client(message, private, batches)`` is a client's work. ``step(state, replies, server)`` is what the server does
    with what came up. ``params(state)`` is the model to evaluate and to save, and ``with_params(state, params)`` the
    state with another model, so that algorithms can be built on others. These functions are pure: they change none of
    their arguments. An algorithm whose step writes into its state says so where it is made.

    ``batching`` names the client populations that the algorithm trains on and how each cuts its data (empty: it needs
    no clients). ``uploads = "sum"`` promises that only weighted means of uploads are used, which allows streaming,
    secure aggregation and all-reduce; ``"each"`` asks for every client's upload. ``decode`` turns an upload as it
    travelled into the values that are averaged (None: nothing is encoded).

    ``bound`` is the largest norm of an update that a client sends up; it drops a longer one itself, so that the promise
    of sums stands (None: there is no bound; :func:`mixfed.transforms.bound.bounded` sets it).

    ``lateness``, ``own``, ``rows`` and ``centre`` are capabilities, each with defaults that suit a plain algorithm.

    ``diagnostics(state)`` are numbers about the last step that are worth a look, recorded for every round with a step.
    ``restore(state, device)`` makes a state from a checkpoint, which is in main memory, usable again: on the model's
    device, except for what is kept elsewhere.
    """

    name: str
    model: Model
    init: Callable[[Params], State]
    broadcast: Callable[[State, Server], tuple[dict[str, Message], State]]
    step: Callable[[State, Sequence[Reply], Server], State]
    client: Callable[[Message, Private, Batches], tuple[Upload, Private]] = _asks_no_client
    params: Callable[[State], Params] = lambda state: state["params"]
    with_params: Callable[[State, Params], State] = lambda state, params: state | {"params": params}
    batching: Mapping[str, Batching] = field(default_factory=dict)
    uploads: Literal["sum", "each"] = "sum"
    decode: Decode | None = None
    bound: float | None = None
    lateness: Lateness = field(default_factory=Lateness)
    own: OwnParts = field(default_factory=OwnParts)
    rows: RowWise = field(default_factory=RowWise)
    centre: AtCentre = field(default_factory=AtCentre)
    diagnostics: Callable[[State], Mapping[str, float]] = lambda state: {}
    restore: Callable[[State, torch.device], State] = tree.to_device

    def __post_init__(self) -> None:
        if self.own.model is None and self.model.buffer_policy == "private" and self.model.buffers:
            object.__setattr__(self, "own", replace(self.own, model=received))

    @property
    def personal(self) -> Personal | None:
        """A client's own model, where clients have one; private buffers (BatchNorm's statistics) alone make it so."""
        return self.own.model

    def decoded(self, values: dict[str, Params]) -> dict[str, Params]:
        """The values of an upload as the server uses them."""
        return self.decode(values) if self.decode else values


def mean(replies: Sequence[Reply], name: str) -> Params:
    """Σ wᵣ·vᵣ / Σ wᵣ over the replies: the weighted mean over all their clients."""
    if len(replies) == 1:
        return replies[0].values[name]
    total = sum(r.weight for r in replies)
    return tree.combine([r.values[name] for r in replies], [r.weight / total for r in replies])


def sent_down(model: Model, params: Params) -> Params:
    """What of the model travels to a client: all of it in the model's precision, without private buffers."""
    kept = model.buffers if model.buffer_policy == "private" else ()
    return tree.cast({n: p for n, p in params.items() if n not in kept}, model.dtype)


def received(sent: Params, private: Private) -> Params:
    """The whole model on a client's device: what was sent and the buffers it keeps."""
    return sent | private.get("buffers", {})


def kept_private(model: Model, params: Params) -> Private:
    """What any algorithm leaves on the device because of the model's buffer policy."""
    if model.buffer_policy != "private" or not model.buffers:
        return {}
    return {"buffers": {n: params[n].to(model.dtype) for n in model.buffers}}


def own_model(model: Model, start: Params, end: Params) -> Params:
    """The model that a client keeps to itself after training.

    It is the trained model. Where the policy discards what clients make of buffers, it has the buffers of the start.
    """
    return end | {n: start[n] for n in model.buffers} if model.buffer_policy == "server" else end


def change(model: Model, start: Params, end: Params) -> Params:
    """Δ = end − start on what travels up: trainable leaves, and float buffers where they are averaged."""
    names = model.trainable + (model.buffers if model.buffer_policy == "average" else ())
    return {n: end[n] - start[n] for n in names}


def server_step(
    model: Model, optimizer: Optimizer, params: Params, delta: Params, memory: Memory, round: int
) -> tuple[Params, Memory]:
    """x ← ServerOpt(x, −Δ) on trainable leaves; float buffers that came up are averaged, x + Δ, whatever the rule.

    Leaves that did not come up (those that clients keep to themselves) stay as they are.
    """
    moved, change = with_statistics(model, params, delta), {n: delta[n] for n in model.trainable if n in delta}
    if optimizer.is_plain_sgd:
        return tree.add(moved, change, optimizer.rate(round)), memory
    return optimizer.step(moved, {n: -d for n, d in change.items()}, memory, round)


def with_statistics(model: Model, params: Params, delta: Params) -> Params:
    """The parameters with averaged float buffers moved, x + Δ.

    A change that a client made long ago may take away more than is left by now of a variance, which must stay above
    zero: such an entry falls to a tenth instead. Where nobody is late this never happens.
    """
    moved = tree.add(params, {n: delta[n] for n in model.buffers if n in delta})
    for name in model.buffers:
        if name in delta and name.endswith("running_var"):  # as BatchNorm calls it
            moved[name] = torch.where(moved[name] > 0, moved[name], 0.1 * params[name])
    return moved


def as_server_copy(trained: Params, server: Params) -> Params:
    """Locally trained parameters in the precision of the server's copy."""
    return {n: p.to(server[n].dtype) for n, p in trained.items()}
