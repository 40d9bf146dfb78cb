"""Every algorithm by name, with one line each and the way it is made from a common set-up.

A new algorithm is a function that returns an :class:`mixfed.core.algorithm.Algorithm`, and one more row in
``ALGORITHMS``. Nothing here needs PyTorch: an algorithm's module is imported when the algorithm is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from mixfed.deferred import Deferred
from mixfed.errors import InputError
from mixfed.ranges import Range, check_range

if TYPE_CHECKING:
    from mixfed.algorithms.makers import Setup
    from mixfed.core.algorithm import Algorithm


@dataclass(frozen=True)
class Entry:
    """``make(setup, **options)`` builds the algorithm; ``oracle`` puts the central data on the clients as well.

    ``centre`` says that it trains on data at the centre, and ``mixes`` that it minimises a regulariser there, if there
    is one, and then needs no data. ``built_on_others`` says that it takes the name of another algorithm for its base.
    """

    line: str
    make: Callable[..., Algorithm]
    oracle: bool = False
    centre: bool = False
    mixes: bool = False
    built_on_others: bool = False


def _made(name: str) -> Deferred[Algorithm]:
    """What :mod:`mixfed.algorithms.makers` makes of a set-up."""
    return Deferred("mixfed.algorithms.makers", f"make_{name}")


def _on_clients(module: str, name: str, *, with_server: bool = False) -> Callable[..., Algorithm]:
    """What a function of this room makes of the clients' training, and of the server's optimizer if it takes one."""
    make: Deferred[Algorithm] = Deferred(f"mixfed.algorithms.{module}", name)

    def made(setup: Setup, **options: Any) -> Algorithm:
        return make(setup.client, **options, **({"server": setup.server} if with_server else {}))

    made.__wrapped__ = make  # type: ignore[attr-defined]  # so that its options can be listed
    return made


ALGORITHMS: dict[str, Entry] = {
    "fedavg": Entry("federated averaging: clients train, the server averages", _made("fedavg")),
    "fedprox": Entry(
        "FedAvg whose clients are pulled back to the model they received",
        _on_clients("fedavg", "fedprox", with_server=True),
    ),
    "fedavgm": Entry("FedAvg with momentum on the server", _on_clients("fedavg", "fedavgm")),
    "fedadam": Entry("FedAvg with Adam on the server", _on_clients("fedavg", "fedadam")),
    "fedyogi": Entry("FedAvg with Yogi on the server", _on_clients("fedavg", "fedyogi")),
    "fedadagrad": Entry("FedAvg with AdaGrad on the server", _on_clients("fedavg", "fedadagrad")),
    "fedasync": Entry(
        "every update is mixed into the model when it comes, the less the staler",
        _on_clients("asynchronous", "fedasync"),
    ),
    "fedbuff": Entry(
        "updates are buffered and added once there are enough, the less the staler",
        _on_clients("asynchronous", "fedbuff", with_server=True),
    ),
    "ca2fl": Entry(
        "FedBuff with every client's last update standing in for it",
        _on_clients("asynchronous", "ca2fl", with_server=True),
    ),
    "center": Entry("the server trains on its own data and asks no client", _made("center"), centre=True),
    "local": Entry("every client trains alone; nothing is sent", _made("local")),
    "mtl": Entry("every client's own model, held close to the mean of all", _on_clients("mtl", "mtl")),
    "lg_fedavg": Entry(
        "part of the model stays on the client, the rest is averaged", _made("lg_fedavg"), built_on_others=True
    ),
    "oracle": Entry("FedAvg as if the central data were on the clients too", _made("oracle"), oracle=True),
    "transfer": Entry("the centre first, then FedAvg: the second half forgets", _made("transfer"), centre=True),
    "parallel": Entry(
        "mixed: a FedAvg round beside central steps, the two updates added", _made("parallel"), centre=True, mixes=True
    ),
    "example_transfer": Entry("mixed: clients receive central examples and train on both", _made("example_transfer")),
    "gradient_1way": Entry(
        "mixed: clients add a central gradient to each of their own", _made("gradient_1way"), centre=True, mixes=True
    ),
    "fed_ft": Entry(
        "hybrid: the federated model is fine-tuned at the centre after every step", _made("fed_ft"), centre=True
    ),
    "hfcl": Entry("hybrid: the centre is one more client, and never late", _made("hfcl"), centre=True),
    "feddf": Entry(
        "hybrid: the mean of the clients' models learns to answer as all of them together", _made("feddf"), centre=True
    ),
    "feddle": Entry("hybrid: central data guides how client updates are merged", _made("feddle"), centre=True),
    "feddle_plus": Entry(
        "hybrid: Feddle whose search also has the server's own update", _made("feddle_plus"), centre=True
    ),
    "gradient_2way": Entry(
        "mixed: clients and centre add each other's last gradient", _made("gradient_2way"), centre=True, mixes=True
    ),
}


NO_CENTRE = "there is none; give it a file or a share of the examples (data.central; centre of a Task)"


def refuse_without_centre(why: str = NO_CENTRE) -> NoReturn:
    """Refuses an algorithm that cannot do without data at the centre."""
    raise InputError(f"This algorithm trains on data at the centre, and {why}.")


BASES = [name for name, entry in ALGORITHMS.items() if not entry.oracle and not entry.built_on_others]
Base = Annotated[
    str, Range(f"an algorithm that another can be built on ({', '.join(BASES)})", lambda name: name in BASES)
]


def base_of(name: str) -> Entry:
    """The algorithm that another one is built on; whether it can be is up to that one."""
    check_range(name, Base, "The base")
    return ALGORITHMS[name]
