"""Every algorithm by name, with one line each and the way it is made from a common set-up.

A new algorithm is a function that returns an :class:`mixfed.core.algorithm.Algorithm`, and one more row in
``ALGORITHMS``. Nothing here needs PyTorch: an algorithm's module is imported when the algorithm is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mixfed.deferred import Deferred
from mixfed.errors import InputError

if TYPE_CHECKING:
    from mixfed.algorithms.makers import Setup
    from mixfed.core.algorithm import Algorithm


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


def _made(name: str) -> Deferred[Algorithm]:
    """What :mod:`mixfed.algorithms.makers` makes of a set-up."""
    return Deferred("mixfed.algorithms.makers", f"make_{name}")


def _on_clients(module: str, name: str) -> Callable[..., Algorithm]:
    """What a function of this room makes of the clients' training alone."""
    make: Deferred[Algorithm] = Deferred(f"mixfed.algorithms.{module}", name)

    def made(setup: Setup, **options: Any) -> Algorithm:
        return make(setup.client, **options)

    made.__wrapped__ = make  # type: ignore[attr-defined]  # so that its options can be listed
    return made


ALGORITHMS: dict[str, Entry] = {
    "fedavg": Entry("federated averaging: clients train, the server averages", _made("fedavg")),
    "fedprox": Entry("FedAvg whose clients are pulled back to the model they received", _made("fedprox")),
    "fedavgm": Entry("FedAvg with momentum on the server", _on_clients("fedavg", "fedavgm")),
    "fedadam": Entry("FedAvg with Adam on the server", _on_clients("fedavg", "fedadam")),
    "fedyogi": Entry("FedAvg with Yogi on the server", _on_clients("fedavg", "fedyogi")),
    "fedadagrad": Entry("FedAvg with AdaGrad on the server", _on_clients("fedavg", "fedadagrad")),
    "fedasync": Entry(
        "every update is mixed into the model when it comes, the less the staler",
        _on_clients("asynchronous", "fedasync"),
    ),
    "fedbuff": Entry("updates are buffered and added once there are enough, the less the staler", _made("fedbuff")),
    "ca2fl": Entry("FedBuff with every client's last update standing in for it", _made("ca2fl")),
    "center": Entry("the server trains on its own data and asks no client", _made("center")),
    "local": Entry("every client trains alone; nothing is sent", _made("local")),
    "mtl": Entry("every client's own model, held close to the mean of all", _on_clients("mtl", "mtl")),
    "lg_fedavg": Entry(
        "part of the model stays on the client, the rest is averaged", _made("lg_fedavg"), built_on_others=True
    ),
    "oracle": Entry("FedAvg as if the central data were on the clients too", _made("oracle"), oracle=True),
    "transfer": Entry("the centre first, then FedAvg: the second half forgets", _made("transfer")),
    "parallel": Entry(
        "mixed: a FedAvg round beside central steps, the two updates added", _made("parallel"), mixes=True
    ),
    "example_transfer": Entry("mixed: clients receive central examples and train on both", _made("example_transfer")),
    "gradient_1way": Entry(
        "mixed: clients add a central gradient to each of their own", _made("gradient_1way"), mixes=True
    ),
    "fed_ft": Entry("hybrid: the federated model is fine-tuned at the centre after every step", _made("fed_ft")),
    "hfcl": Entry("hybrid: the centre is one more client, and never late", _made("hfcl")),
    "feddf": Entry("hybrid: the mean of the clients' models learns to answer as all of them together", _made("feddf")),
    "feddle": Entry("hybrid: central data guides how client updates are merged", _made("feddle")),
    "feddle_plus": Entry("hybrid: Feddle whose search also has the server's own update", _made("feddle_plus")),
    "gradient_2way": Entry(
        "mixed: clients and centre add each other's last gradient", _made("gradient_2way"), mixes=True
    ),
}


def base_of(name: str) -> Entry:
    """The algorithm that another one is built on; whether it can be is up to that one."""
    if name not in ALGORITHMS or ALGORITHMS[name].oracle or ALGORITHMS[name].built_on_others:
        usable = [n for n, entry in ALGORITHMS.items() if not entry.oracle and not entry.built_on_others]
        raise InputError(f"'{name}' is no algorithm that another can be built on; there are {', '.join(usable)}.")
    return ALGORITHMS[name]
