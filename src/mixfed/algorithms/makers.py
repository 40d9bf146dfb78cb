"""How the algorithms of the registry are made from a common set-up; what follows it are their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mixfed.algorithms.asynchronous import fedbuff
from mixfed.algorithms.baselines import center, local, transfer
from mixfed.algorithms.fedavg import fedavg
from mixfed.algorithms.feddle.central import CentralAnchor
from mixfed.algorithms.feddle.fallbacks import Fallback, like_fedavg, like_fedbuff
from mixfed.algorithms.feddle.guidance import Head, Objective
from mixfed.algorithms.feddle.search import Search, feddle, feddle_plus
from mixfed.algorithms.hybrid import fed_ft, feddf, hfcl
from mixfed.algorithms.local_global import global_part, local_global
from mixfed.algorithms.mixed import Centre, Population, example_transfer, gradient_1way, gradient_2way, parallel
from mixfed.algorithms.registry import NO_CENTRE, Base, base_of, refuse_without_centre
from mixfed.core.algorithm import Algorithm
from mixfed.core.optim import Optimizer, sgd
from mixfed.core.storage import Place
from mixfed.core.train import LocalTrainer
from mixfed.errors import InputError
from mixfed.ranges import Bits, Count, CountOrNone, NotNegative, PartOfOne, Positive, Rule, Share, within_ranges


@dataclass(frozen=True)
class Setup:
    """What a recipe gives every algorithm alike, so that methods are compared on one footing."""

    client: LocalTrainer
    server: Optimizer
    rounds: int
    centre: LocalTrainer | None = None
    merge: Optimizer = field(default_factory=lambda: sgd(1.0))
    regulariser: LocalTrainer | None = None
    """The centre's training on a loss that needs no data."""
    weights: tuple[float, float] = (1.0, 1.0)
    """w_f and w_c: of the clients' and of the centre's loss in the mixed loss."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The settings of algorithms by name, for those that are built on another one."""
    without_centre: str = NO_CENTRE
    """Why there is no ``centre``."""
    of_other_domain: bool = False
    """Whether the centre's labels are not the task's."""

    def population(self) -> Population:
        """The clients as a source of the mixed loss."""
        return Population(self.client, self.weights[0], self.server)

    def central_source(self, batch_size: int = 0) -> Centre:
        """The centre as a source of the mixed loss, if wished with another batch size."""
        trainer = self.at_centre()
        if batch_size:
            trainer = replace(trainer, batching=replace(trainer.batching, batch_size=batch_size))
        return Centre(trainer, self.weights[1])

    def central_sources(self, batch_size: int = 0) -> list[Centre]:
        """All that is minimised at the centre: the loss of its data, and a regulariser."""
        if self.regulariser is None:
            return [self.central_source(batch_size)]
        alone = Centre(self.regulariser, self.weights[1], "regulariser", needs_data=False)
        return [alone] if self.centre is None else [self.central_source(batch_size), alone]

    def at_centre(self, *, labels: bool = True) -> LocalTrainer:
        """The central trainer, which some algorithms cannot do without; with ``labels`` its labels are the task's."""
        if self.centre is None:
            refuse_without_centre(self.without_centre)
        if labels:
            self.refuse_other_domain()
        return self.centre

    def refuse_other_domain(self) -> None:
        """For what takes the centre's labels as the task's."""
        if self.of_other_domain:
            raise InputError(
                "The centre's data is of another domain, and this algorithm would take its labels"
                " as the task's; choose feddf, or feddle with the objective out_of_domain or rotation."
            )


def make_transfer(setup: Setup, *, central_rounds: CountOrNone = 0) -> Algorithm:
    return transfer(
        setup.client,
        setup.at_centre(),
        central_rounds=central_rounds or setup.rounds // 2,
        server=setup.server,
    )


def make_fedavg(setup: Setup) -> Algorithm:
    return fedavg(setup.client, server=setup.server)


def make_oracle(setup: Setup) -> Algorithm:
    setup.refuse_other_domain()
    return make_fedavg(setup)


def make_parallel(setup: Setup, *, alpha: Share | None = None) -> Algorithm:
    return parallel(setup.population(), setup.central_sources(), merge=setup.merge, alpha=alpha)


def make_gradient_1way(setup: Setup, *, central_batch_size: CountOrNone = 0) -> Algorithm:
    return gradient_1way(setup.population(), setup.central_sources(central_batch_size))


def make_gradient_2way(setup: Setup, *, by_clients: bool = False) -> Algorithm:
    return gradient_2way(setup.population(), setup.central_sources(), merge=setup.merge, by_clients=by_clients)


@within_ranges(
    Rule(
        "Example transfer takes either a mixing ratio or a number of examples.",
        lambda ratio, count: ratio is None or count is None,
    )
)
def make_example_transfer(
    setup: Setup, *, ratio: PartOfOne | None = None, count: CountOrNone | None = None
) -> Algorithm:
    setup.refuse_other_domain()
    if ratio is None and count is None:
        ratio = setup.weights[1] / sum(setup.weights)
    return example_transfer(setup.client, ratio=ratio, count=count, server=setup.server)


def make_lg_fedavg(
    setup: Setup,
    *,
    base: Base = "fedavg",
    layers: CountOrNone = 1,
    side: Literal["last", "first"] = "last",
    names: Sequence[str] = (),
    warm_start: CountOrNone = 0,
) -> Algorithm:
    """``layers`` of the model on one ``side`` are global (or the parameters whose names begin with ``names``)."""
    model = setup.client.model
    is_global = global_part(model, layers, side, names)
    return local_global(base_of(base).make(setup, **setup.options.get(base, {})), is_global, warm_start=warm_start)


PlainBase = Literal["fedbuff", "fedavg"]


def _base(setup: Setup, base: PlainBase) -> Algorithm:
    if base not in ("fedbuff", "fedavg"):
        raise InputError(f"A hybrid method is built on fedbuff or fedavg, not on '{base}'.")
    return fedbuff(setup.client, buffer=0, server=setup.server) if base == "fedbuff" else make_fedavg(setup)


def make_fed_ft(setup: Setup, *, base: PlainBase = "fedbuff") -> Algorithm:
    return fed_ft(_base(setup, base), setup.at_centre())


def make_hfcl(setup: Setup, *, base: PlainBase = "fedbuff") -> Algorithm:
    return hfcl(_base(setup, base), setup.at_centre(), by_examples=base == "fedavg")


def make_feddf(setup: Setup, *, learning_rate: NotNegative = 1e-3, temperature: Positive = 1.0) -> Algorithm:
    batching = setup.at_centre(labels=False).batching
    return feddf(
        setup.client,
        batching,
        learning_rate=learning_rate,
        temperature=temperature,
        other_domain=setup.of_other_domain,
    )


def _fallback(setup: Setup, name: str) -> Fallback | Algorithm:
    """FedBuff and FedAvg are coefficients of updates, unless a server optimizer makes something else of their sum.

    Of another algorithm Feddle needs a change or a model from one population of clients, and says so where it is not.
    """
    server = setup.server
    if name in ("fedbuff", "fedavg") and server.is_plain_sgd and server.is_constant:
        return like_fedbuff(server.learning_rate) if name == "fedbuff" else like_fedavg(server.learning_rate)
    made = base_of(name).make(setup)
    return replace(made, lateness=replace(made.lateness, buffer=0))


def make_feddle(
    setup: Setup,
    *,
    atlas: Count = 20,
    bits: Bits = 32,
    anchors: Place = "device",
    objective: Objective = "in_domain",
    learning_rate: NotNegative = 1e-3,
    regularisation: NotNegative | None = None,
    fallback: Base = "fedbuff",
    normalise: bool = True,
    by_score: bool = True,
    fallback_start: bool = True,
    search: bool = True,
    head: str = "",
    head_rate: NotNegative = 1e-2,
    head_steps: Count = 50,
    compare: str = "",
    cosine: bool = False,
    tail: Share = 0.0,
) -> Algorithm:
    """``regularisation`` is the paper's if left out: none in-domain, 0.01 for data of another domain."""
    if regularisation is None:
        regularisation = 0.0 if objective == "in_domain" else 0.01
    how = Search(
        setup.at_centre(labels=search and objective == "in_domain").batching,
        objective,
        learning_rate,
        regularisation,
        normalise,
        by_score,
        fallback_start,
        search,
        Head(head, head_rate, head_steps),
        compare,
        cosine,
        tail,
    )
    return feddle(setup.client, how, atlas=atlas, bits=bits, place=anchors, fallback=_fallback(setup, fallback))


def make_feddle_plus(
    setup: Setup,
    *,
    atlas: Count = 20,
    bits: Bits = 32,
    anchors: Place = "device",
    learning_rate: NotNegative = 1e-3,
    regularisation: NotNegative = 0.0,
    fallback: Base = "fedbuff",
    search: bool = True,
    search_steps: CountOrNone = 0,
    cosine: bool = True,
    tail: Share = 0.0,
    share: float = 1.0,
    held_out: PartOfOne = 0.25,
) -> Algorithm:
    """The centre trains as the set-up says; a search takes ``search_steps`` steps, or as many (0)."""
    centre = setup.at_centre()
    batching = replace(centre.batching, steps=search_steps, epochs=None) if search_steps else centre.batching
    how = Search(batching, "in_domain", learning_rate, regularisation, active=search, cosine=cosine, tail=tail)
    own = CentralAnchor(centre, share, held_out)
    return feddle_plus(
        setup.client, how, own, atlas=atlas, bits=bits, place=anchors, fallback=_fallback(setup, fallback)
    )


def make_center(setup: Setup) -> Algorithm:
    return center(setup.at_centre())


def make_local(setup: Setup) -> Algorithm:
    return local(setup.client)
