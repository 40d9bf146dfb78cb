"""Mixed federated learning: clients and centre minimise f = Σ w_j·f_j together (Augenstein et al., 2021 and 2022).

A source of gradients is a population of clients or a centre; "federated and central" is the case with one of each.
Parallel Training and 2-way Gradient Transfer are one algorithm that shares gradients or does not, as in Algorithm 1
of the 2022 paper; 1-way Gradient Transfer is its Algorithm 2; Example Transfer is Algorithm 3 of the 2021 paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from mixfed.algorithms.fedavg import fedavg
from mixfed.core import algorithm as core
from mixfed.core import optim, tree
from mixfed.core.algorithm import (
    CENTRE,
    CLIENTS,
    Algorithm,
    AtCentre,
    Message,
    OwnParts,
    Private,
    Reply,
    Server,
    State,
    Upload,
)
from mixfed.core.batches import Batches, Sample
from mixfed.core.model import Model
from mixfed.core.optim import Optimizer
from mixfed.core.train import LocalTrainer, weighted
from mixfed.core.tree import Params
from mixfed.errors import InputError
from mixfed.ranges import Share, within_ranges


@dataclass(frozen=True)
class Population:
    """Clients: how they train, the weight of their loss in f, and the server optimizer for their mean update."""

    trainer: LocalTrainer
    weight: float = 1.0
    server: Optimizer = field(default_factory=lambda: optim.sgd(1.0))
    name: str = CLIENTS

    def __post_init__(self) -> None:
        optim.given(self.server, "The optimizer of the server")


@dataclass(frozen=True)
class Centre:
    """Data at the server: how it is trained on and the weight of its loss in f.

    ``needs_data = False`` is a loss of the parameters alone (a regulariser): ``trainer.loss`` is given and sees empty
    batches.
    """

    trainer: LocalTrainer
    weight: float = 1.0
    name: str = CENTRE
    needs_data: bool = True


Populations = LocalTrainer | Population | Sequence[Population]
Centres = LocalTrainer | Centre | Sequence[Centre]


@within_ranges()
def parallel(
    populations: Populations,
    centres: Centres = (),
    *,
    merge: Optimizer | None = None,
    alpha: Share | None = None,
) -> Algorithm:
    """Parallel Training: a round of FedAvg and K_c central steps from the same x, then x ← MergeOpt(x, −Δ).

    Δ = Δ_c + Δ_f with the weights inside the losses (2022), or with ``alpha`` Δ = αΔ_c + (1 − α)Δ_f (2021).
    """
    clients, central = _populations(populations), _centres(centres)
    shares: dict[str, float] = {}
    if alpha is not None:
        if len(clients) != 1 or len(central) != 1:
            raise InputError("alpha merges one population with one centre; with more sources use loss weights.")
        shares = {clients[0].name: 1 - alpha, central[0].name: alpha}
    merged = _merged("parallel", clients, central, merge, shares, share_gradients=False)
    return replace(merged, centre=_at_centre(centres))


def gradient_2way(
    populations: Populations, centres: Centres = (), *, merge: Optimizer | None = None, by_clients: bool = False
) -> Algorithm:
    """2-way Gradient Transfer: Parallel Training in which every source adds the others' last gradients to its own.

    Source j steps with g_j + Σ_{l≠j} g̃_l, and afterwards g̃_j = −Δ_j/(η_j·K_j) − Σ_{l≠j} g̃_l: the mean gradient it saw,
    recovered from the update alone. Only means over clients enter, each weighted as the update is (with equal weights
    this is the paper's formula). Recovery is exact for plain SGD; a client with any other optimizer uploads the sum of
    its raw gradients, which the ledger shows.

    The paper's g̃_f = −ΣΔᵢ/(η·ΣKᵢ) − g̃_c (Eq. 10) has plain sums over clients. ``by_clients`` computes that one where
    weights differ too; what a client then sends up for it (Δᵢ/pᵢ, unless it sends raw gradients anyway) is in the
    ledger.

    Once the transfers are warm every source's update contains all gradients, so with a merge rate of 1 a round goes
    about twice as far as Parallel Training does with two sources, and diverges earlier; a merge rate of 0.5 makes the
    steps alike. The default is the paper's 1.
    """
    clients, central = _populations(populations), _centres(centres)
    if len(clients) + len(central) < 2:
        raise InputError("2-way gradient transfer needs a second source: a centre or another population of clients.")
    merged = _merged("gradient_2way", clients, central, merge, {}, share_gradients=True, by_clients=by_clients)
    return replace(merged, centre=_at_centre(centres))


def gradient_1way(populations: Populations, centres: Centres) -> Algorithm:
    """1-way Gradient Transfer: g̃_c = ∇f_c(x⁽ᵗ⁾) on one central batch; every client step uses gᵢ + g̃_c.

    The rest is FedAvg. Several populations each take an equal part of g̃_c, because their updates are added up.
    """
    clients, central = _populations(populations), _centres(centres)
    if not central:
        raise InputError("1-way gradient transfer sends a central gradient; give a centre, or use parallel training.")
    base = _merged("gradient_1way", clients, (), None, {}, share_gradients=False)

    def broadcast(state: State, server: Server) -> tuple[dict[str, Message], State]:
        parts = [server.gradient(c.trainer, state["params"], source=_data_of(c)) for c in central]
        correction = tree.cast(tree.combine(parts, [1.0 / len(clients)] * len(parts)), base.model.dtype)
        messages, state = base.broadcast(state, server)
        return {
            name: replace(message, payload=message.payload | {"correction": correction})
            for name, message in messages.items()
        }, state

    return replace(base, broadcast=broadcast, centre=_at_centre(centres))


def example_transfer(
    trainer: LocalTrainer,
    *,
    ratio: float | None = None,
    count: int | None = None,
    server: Optimizer | None = None,
    source: str = CENTRE,
) -> Algorithm:
    """Example Transfer: every client of the round also receives a fresh sample of central examples.

    The sample is shuffled into the client's own examples for this round, so that local steps see mixed batches; f_f and
    f_c are weighted by the mixing ``ratio`` (the central share of the mixed examples; a half if nothing is said), or by
    a fixed ``count``.
    """
    base = fedavg(trainer, server=server, name="example_transfer")
    sample = Sample(source, 0.5 if ratio is None and count is None else ratio, count)

    def broadcast(state: State, at: Server) -> tuple[dict[str, Message], State]:
        messages, state = base.broadcast(state, at)
        return {name: replace(message, examples=sample) for name, message in messages.items()}, state

    return replace(base, broadcast=broadcast, centre=AtCentre((source,) if trainer.loss is None else ()))


@dataclass(frozen=True)
class _Sources:
    """Algorithm 1 of the 2022 paper for any number of sources; ``shares`` scale a source's update in the sum."""

    model: Model
    populations: Sequence[Population]
    centres: Sequence[Centre]
    merge: Optimizer
    shares: Mapping[str, float]
    share_gradients: bool
    by_clients: bool = False
    """Gradients are plain means over clients: the mean with weights pᵢ of Δᵢ/pᵢ, over that of Kᵢ/pᵢ, is ΣΔᵢ/ΣKᵢ."""

    def algorithm(self, name: str) -> Algorithm:
        return Algorithm(
            name,
            self.model,
            self.init,
            self.broadcast,
            self.step,
            self.client,
            batching={p.name: p.trainer.batching for p in self.populations},
            own=OwnParts(lambda params: core.kept_private(self.model, params)),
        )

    def init(self, params: Params) -> State:
        trained = self.model.trained(params)
        state: State = {
            "params": params,
            "server": {p.name: p.server.init(trained) for p in self.populations},
            "merge": self.merge.init(trained),
        }
        names = [p.name for p in self.populations] + [c.name for c in self.centres]
        return state | ({"gradients": {n: tree.zeros(trained) for n in names}} if self.share_gradients else {})

    def broadcast(self, state: State, server: Server) -> tuple[dict[str, Message], State]:
        params = core.sent_down(self.model, state["params"])
        messages = {}
        for population in self.populations:
            payload = {"params": params}
            if self.share_gradients:
                payload["correction"] = tree.cast(_others(state, population.name), self.model.dtype)
            messages[population.name] = Message(payload, server.round)
        return messages, state

    def client(self, message: Message, private: Private, batches: Batches) -> tuple[Upload, Private]:
        trainer = next(p.trainer for p in self.populations if p.name == batches.source)
        start = core.received(message["params"], private)
        correction = message.get("correction")
        end = trainer.train(start, batches, message.round, correction=correction, want_gradient=self.share_gradients)
        values = {"delta": core.change(self.model, start, end.params)}
        if self.share_gradients:
            values["steps"] = {"count": batches.steps}
        if end.gradient_sum is not None:
            values["gradient"] = end.gradient_sum
        elif self.by_clients:
            values["evenly"] = {n: values["delta"][n] for n in self.model.trainable}
        if self.by_clients:
            values |= {n: tree.scale(values[n], 1.0 / batches.examples) for n in values if n != "delta"}
        return Upload(values, batches.examples), core.kept_private(self.model, end.params)

    def step(self, state: State, replies: Sequence[Reply], server: Server) -> State:
        updates: dict[str, Params] = {}
        memories: dict[str, optim.Memory] = {}
        gradients: dict[str, Params] = {}
        for population in self.populations:
            at, mine = population.name, [r for r in replies if r.source == population.name]
            if mine:
                updates[at], memories[at], seen = self._of_clients(population, mine, state, server)
            else:  # under delays: nothing has come from these clients, so nothing is known of them anew
                memories[at], seen = state["server"][at], state.get("gradients", {}).get(at)
            gradients |= {} if seen is None else {at: seen}
        for centre in self.centres:
            updates[centre.name], seen = self._of_centre(centre, state, server)
            gradients |= {} if seen is None else {centre.name: seen}
        merged = _sum_of(self.model, updates, self.shares)
        params, memory = core.server_step(self.model, self.merge, state["params"], merged, state["merge"], server.round)
        state = {"params": params, "server": memories, "merge": memory}
        return state | ({"gradients": gradients} if self.share_gradients else {})

    def _of_clients(
        self, population: Population, replies: Sequence[Reply], state: State, server: Server
    ) -> tuple[Params, optim.Memory, Params | None]:
        """The update of a population, the memory of its server optimizer, and the gradient to share, if any."""
        mean = {value: core.mean(replies, value) for value in replies[0].values}
        before, memory = state["params"], state["server"][population.name]
        moved, memory = core.server_step(self.model, population.server, before, mean["delta"], memory, server.round)
        update = tree.sub(moved, before)
        if not self.share_gradients:
            return update, memory, None
        correction, steps = _others(state, population.name), mean["steps"]["count"]
        moved_evenly, gradient = mean.get("evenly", mean["delta"]), mean.get("gradient")
        seen = _gradient_seen(population.trainer, moved_evenly, steps, correction, server.round, gradient)
        return update, memory, seen

    def _of_centre(self, centre: Centre, state: State, server: Server) -> tuple[Params, Params | None]:
        """The update of a centre, and the gradient to share, if any."""
        params, correction = state["params"], _others(state, centre.name) if self.share_gradients else None
        end = server.train(
            centre.trainer,
            params,
            correction=correction,
            source=_data_of(centre),
            want_gradient=self.share_gradients,
        )
        update = tree.sub(core.as_server_copy(end.params, params), params)
        if correction is None:
            return update, None
        return update, _gradient_seen(centre.trainer, update, end.steps, correction, server.round, end.gradient_sum)


def _merged(
    name: str,
    populations: Sequence[Population],
    centres: Sequence[Centre],
    merge: Optimizer | None,
    shares: Mapping[str, float],
    *,
    share_gradients: bool,
    by_clients: bool = False,
) -> Algorithm:
    model, merge = _common_model(populations, centres), optim.given(merge, "The optimizer of the merge")
    return _Sources(model, populations, centres, merge, shares, share_gradients, by_clients).algorithm(name)


def _others(state: State, source: str) -> Params:
    """Σ_{l≠j} g̃_l: the last gradients of all sources but this one."""
    gradients = [g for n, g in state["gradients"].items() if n != source]
    return tree.combine(gradients, [1.0] * len(gradients))


def _gradient_seen(
    trainer: LocalTrainer, delta: Params, steps: Tensor, correction: Params, round: int, gradient_sum: Params | None
) -> Params:
    """The mean raw gradient of a source: uploaded as a sum, or recovered from SGD's Δ = −η·Σₖ(gₖ + correction).

    It has the leaves that came up; a source adds nothing to its gradient on those that others keep to themselves.
    """
    count = float(steps)
    if gradient_sum is not None:
        return tree.scale(gradient_sum, 1.0 / count)
    travelled = trainer.optimizer.rate(round) * count
    return {n: -delta[n] / travelled - c for n, c in correction.items() if n in delta}


def _sum_of(model: Model, updates: Mapping[str, Params], shares: Mapping[str, float]) -> Params:
    """Σ_j share_j·Δ_j on trainable leaves; buffers, which are statistics and not sums, take the mean over sources."""
    total = tree.combine(list(updates.values()), [shares.get(source, 1.0) for source in updates])
    even = tree.combine(list(updates.values()), [1.0 / len(updates)] * len(updates))
    return {n: even[n] if n in model.buffers else x for n, x in total.items()}


def _data_of(centre: Centre) -> str | None:
    return centre.name if centre.needs_data else None


def _populations(given: Populations) -> list[Population]:
    if isinstance(given, LocalTrainer):
        given = Population(given)
    listed = [given] if isinstance(given, Population) else list(given)
    if not listed:
        raise InputError("Mixed learning needs at least one population of clients; use center for the centre alone.")
    return [replace(p, trainer=_weighted(p.trainer, p.weight)) for p in listed]


def _listed(given: Centres) -> list[Centre]:
    if isinstance(given, LocalTrainer):
        given = Centre(given)
    return [given] if isinstance(given, Centre) else list(given)


def _at_centre(given: Centres) -> AtCentre:
    return AtCentre(tuple(c.name for c in _listed(given) if c.needs_data and c.trainer.loss is None))


def _centres(given: Centres) -> list[Centre]:
    listed = _listed(given)
    for centre in listed:
        if not centre.needs_data and centre.trainer.loss is None:
            raise InputError(f"The centre '{centre.name}' has no data, so its trainer must be given a loss.")
    return [replace(c, trainer=_weighted(c.trainer, c.weight)) for c in listed]


def _weighted(trainer: LocalTrainer, weight: float) -> LocalTrainer:
    if not weight >= 0:
        raise InputError(f"A loss cannot have the weight {weight}; give a number that is not negative.")
    return trainer if weight == 1.0 else replace(trainer, loss=weighted(trainer.own_loss, weight))


def _common_model(populations: Sequence[Population], centres: Sequence[Centre]) -> Model:
    names = [p.name for p in populations] + [c.name for c in centres]
    if len(set(names)) < len(names):
        raise InputError(f"Sources need names of their own; these are {', '.join(names)}.")
    model, *others = [p.trainer.model for p in populations] + [c.trainer.model for c in centres]
    if any(other is not model for other in others):
        raise InputError("All sources train one model; build their trainers from the same Model.")
    return model
