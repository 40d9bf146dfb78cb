"""Every algorithm by name, with one line each and the way it is made from a common set-up.

A new algorithm is a function that returns an :class:`mixfed.core.algorithm.Algorithm`, and one more row in
``ALGORITHMS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mixfed.algorithms.asynchronous import Rule, ca2fl, fedasync, fedbuff
from mixfed.algorithms.baselines import center, local_only, transfer
from mixfed.algorithms.fedavg import fedadagrad, fedadam, fedavg, fedavgm, fedprox, fedyogi
from mixfed.algorithms.feddle.fallbacks import Fallback, like_fedavg, like_fedbuff
from mixfed.algorithms.feddle.guidance import Head, Objective
from mixfed.algorithms.feddle.search import Search, feddle
from mixfed.algorithms.hybrid import fed_ft, feddf, hfcl
from mixfed.algorithms.local_global import global_layers, local_global, named
from mixfed.algorithms.mixed import Centre, Population, example_transfer, gradient_1way, gradient_2way, parallel
from mixfed.algorithms.mtl import mtl
from mixfed.core.algorithm import Algorithm
from mixfed.core.optim import Optimizer, sgd
from mixfed.core.storage import Place
from mixfed.core.train import LocalTrainer
from mixfed.errors import InputError


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
    without_centre: str = "the set-up has no central data"
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
            raise InputError(f"This algorithm trains on data at the centre, and {self.without_centre}.")
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


@dataclass(frozen=True)
class Entry:
    """``make(setup, **options)`` builds the algorithm; ``oracle`` puts the central data on the clients as well.

    ``mixes`` says that it minimises a regulariser at the centre, if there is one. ``built_on_others`` says that it
    takes the name of another algorithm for its base.
    """

    line: str
    make: Callable[..., Algorithm]
    oracle: bool = False
    mixes: bool = False
    built_on_others: bool = False


def _transfer(setup: Setup, *, central_rounds: int = 0) -> Algorithm:
    return transfer(
        setup.client,
        setup.at_centre(),
        central_rounds=central_rounds or setup.rounds // 2,
        server=setup.server,
    )


def _plain(setup: Setup) -> Algorithm:
    return fedavg(setup.client, server=setup.server)


def _oracle(setup: Setup) -> Algorithm:
    setup.refuse_other_domain()
    return _plain(setup)


def _fedprox(setup: Setup, *, mu: float = 0.01) -> Algorithm:
    return fedprox(setup.client, mu=mu, server=setup.server)


def _parallel(setup: Setup, *, alpha: float | None = None) -> Algorithm:
    return parallel(setup.population(), setup.central_sources(), merge=setup.merge, alpha=alpha)


def _gradient_1way(setup: Setup, *, central_batch_size: int = 0) -> Algorithm:
    return gradient_1way(setup.population(), setup.central_sources(central_batch_size))


def _gradient_2way(setup: Setup) -> Algorithm:
    return gradient_2way(setup.population(), setup.central_sources(), merge=setup.merge)


def _example_transfer(setup: Setup, *, ratio: float | None = None, count: int | None = None) -> Algorithm:
    setup.refuse_other_domain()
    if ratio is None and count is None:
        ratio = setup.weights[1] / sum(setup.weights)
    return example_transfer(setup.client, ratio=ratio, count=count, server=setup.server)


def _lg_fedavg(
    setup: Setup,
    *,
    base: str = "fedavg",
    layers: int = 1,
    side: Literal["last", "first"] = "last",
    names: Sequence[str] = (),
    warm_start: int = 0,
) -> Algorithm:
    """``layers`` of the model on one ``side`` are global (or the parameters whose names begin with ``names``)."""
    model = setup.client.model
    if warm_start >= setup.rounds:
        raise InputError(
            f"A warm start of {warm_start} rounds leaves no round of {setup.rounds} for what is local;"
            " choose a warm start of fewer rounds."
        )
    is_global = named(names, model) if names else global_layers(model, layers, side)
    return local_global(base_of(base).make(setup, **setup.options.get(base, {})), is_global, warm_start=warm_start)


def base_of(name: str) -> Entry:
    """The algorithm that another one is built on; whether it can be is up to that one."""
    if name not in ALGORITHMS or ALGORITHMS[name].oracle or ALGORITHMS[name].built_on_others:
        usable = [n for n, entry in ALGORITHMS.items() if not entry.oracle and not entry.built_on_others]
        raise InputError(f"'{name}' is no algorithm that another can be built on; there are {', '.join(usable)}.")
    return ALGORITHMS[name]


def _fedbuff(setup: Setup, *, buffer: int = 10, rule: Rule = "polynomial", a: float = 0.5, b: float = 4.0) -> Algorithm:
    return fedbuff(setup.client, buffer=buffer, server=setup.server, rule=rule, a=a, b=b)


def _ca2fl(setup: Setup, *, buffer: int = 10) -> Algorithm:
    return ca2fl(setup.client, buffer=buffer, server=setup.server)


Base = Literal["fedbuff", "fedavg"]


def _base(setup: Setup, base: Base) -> Algorithm:
    if base not in ("fedbuff", "fedavg"):
        raise InputError(f"A hybrid method is built on fedbuff or fedavg, not on '{base}'.")
    return fedbuff(setup.client, buffer=0, server=setup.server) if base == "fedbuff" else _plain(setup)


def _fed_ft(setup: Setup, *, base: Base = "fedbuff") -> Algorithm:
    return fed_ft(_base(setup, base), setup.at_centre())


def _hfcl(setup: Setup, *, base: Base = "fedbuff") -> Algorithm:
    return hfcl(_base(setup, base), setup.at_centre(), by_examples=base == "fedavg")


def _feddf(setup: Setup, *, learning_rate: float = 1e-3, temperature: float = 1.0) -> Algorithm:
    batching = setup.at_centre(labels=False).batching
    return feddf(setup.client, batching, learning_rate=learning_rate, temperature=temperature)


def _fallback(setup: Setup, name: str) -> Fallback | Algorithm:
    """FedBuff and FedAvg are coefficients of updates, unless a server optimizer makes something else of their sum.

    Of another algorithm Feddle needs a change or a model from one population of clients, and says so where it is not.
    """
    server = setup.server
    if name in ("fedbuff", "fedavg") and server.is_plain_sgd and server.decay == 1.0:
        return like_fedbuff(server.learning_rate) if name == "fedbuff" else like_fedavg(server.learning_rate)
    made = base_of(name).make(setup)
    return replace(made, lateness=replace(made.lateness, buffer=0))


def _feddle(
    setup: Setup,
    *,
    atlas: int = 20,
    bits: int = 32,
    anchors: Place = "device",
    objective: Objective = "in_domain",
    learning_rate: float = 1e-3,
    regularisation: float | None = None,
    fallback: str = "fedbuff",
    normalise: bool = True,
    by_score: bool = True,
    fallback_start: bool = True,
    search: bool = True,
    head: str = "",
    head_rate: float = 1e-2,
    head_steps: int = 50,
    compare: str = "",
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
    )
    return feddle(setup.client, how, atlas=atlas, bits=bits, place=anchors, fallback=_fallback(setup, fallback))


def _on_clients(make: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    def made(setup: Setup, **options: Any) -> Algorithm:
        return make(setup.client, **options)

    made.__wrapped__ = make  # type: ignore[attr-defined]  # so that its options can be listed
    return made


ALGORITHMS: dict[str, Entry] = {
    "fedavg": Entry("federated averaging: clients train, the server averages", _plain),
    "fedprox": Entry("FedAvg whose clients are pulled back to the model they received", _fedprox),
    "fedavgm": Entry("FedAvg with momentum on the server", _on_clients(fedavgm)),
    "fedadam": Entry("FedAvg with Adam on the server", _on_clients(fedadam)),
    "fedyogi": Entry("FedAvg with Yogi on the server", _on_clients(fedyogi)),
    "fedadagrad": Entry("FedAvg with AdaGrad on the server", _on_clients(fedadagrad)),
    "fedasync": Entry("every update is mixed into the model when it comes, the less the staler", _on_clients(fedasync)),
    "fedbuff": Entry("updates are buffered and added once there are enough, the less the staler", _fedbuff),
    "ca2fl": Entry("FedBuff with every client's last update standing in for it", _ca2fl),
    "center": Entry("the server trains on its own data and asks no client", lambda setup: center(setup.at_centre())),
    "local": Entry("every client trains alone; nothing is sent", lambda setup: local_only(setup.client)),
    "mtl": Entry("every client's own model, held close to the mean of all", _on_clients(mtl)),
    "lg_fedavg": Entry("part of the model stays on the client, the rest is averaged", _lg_fedavg, built_on_others=True),
    "oracle": Entry("FedAvg as if the central data were on the clients too", _oracle, oracle=True),
    "transfer": Entry("the centre first, then FedAvg: the second half forgets", _transfer),
    "parallel": Entry("mixed: a FedAvg round beside central steps, the two updates added", _parallel, mixes=True),
    "example_transfer": Entry("mixed: clients receive central examples and train on both", _example_transfer),
    "gradient_1way": Entry("mixed: clients add a central gradient to each of their own", _gradient_1way, mixes=True),
    "fed_ft": Entry("hybrid: the federated model is fine-tuned at the centre after every step", _fed_ft),
    "hfcl": Entry("hybrid: the centre is one more client, and never late", _hfcl),
    "feddf": Entry("hybrid: the mean of the clients' models learns to answer as all of them together", _feddf),
    "feddle": Entry("hybrid: central data guides how client updates are merged", _feddle),
    "gradient_2way": Entry("mixed: clients and centre add each other's last gradient", _gradient_2way, mixes=True),
}
