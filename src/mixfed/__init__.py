"""mixfed: learn one model from data you hold and data you cannot see.

The public names, each imported when it is first used, so that the command line starts at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixfed.algorithms.asynchronous import ca2fl, fedasync, fedbuff
    from mixfed.algorithms.baselines import center, local, transfer
    from mixfed.algorithms.fedavg import fedadagrad, fedadam, fedavg, fedavgm, fedprox, fedyogi
    from mixfed.algorithms.feddle.central import CentralAnchor
    from mixfed.algorithms.feddle.search import Search, feddle, feddle_plus
    from mixfed.algorithms.hybrid import fed_ft, feddf, hfcl
    from mixfed.algorithms.local_global import lg_fedavg, local_global
    from mixfed.algorithms.makers import Setup
    from mixfed.algorithms.mixed import Centre, Population, example_transfer, gradient_1way, gradient_2way, parallel
    from mixfed.algorithms.mtl import mtl
    from mixfed.algorithms.registry import ALGORITHMS
    from mixfed.backends.distributed.engine import Distributed
    from mixfed.backends.distributed.ranks import join_ranks
    from mixfed.backends.run import run
    from mixfed.backends.simulator.engine import Simulator
    from mixfed.core.algorithm import Algorithm, Message, Reply, Server, Upload
    from mixfed.core.batches import Batching
    from mixfed.core.checkpoint import Checkpoints, save_params
    from mixfed.core.delays import Dropouts, HalfNormal, LogNormal, Scripted, SpeedClasses, Trace
    from mixfed.core.loop import Record, Result
    from mixfed.core.losses import binary_cross_entropy, cross_entropy, squared_error
    from mixfed.core.model import Model
    from mixfed.core.optim import Optimizer, adagrad, adam, sgd, yogi
    from mixfed.core.schedule import Schedule
    from mixfed.core.train import LocalTrainer
    from mixfed.data import CentralData, FederatedData, load_source, spread
    from mixfed.errors import InputError, RunStopped
    from mixfed.evaluate.metrics import evaluator
    from mixfed.experiments.answering import predict
    from mixfed.experiments.api import Comparison, advise, compare, probe, score, train, tune
    from mixfed.experiments.task import Task
    from mixfed.experiments.using import export, load

    __version__: str

_HOMES = {
    "algorithms.registry": ["ALGORITHMS"],
    "algorithms.makers": ["Setup"],
    "algorithms.asynchronous": ["ca2fl", "fedasync", "fedbuff"],
    "algorithms.baselines": ["center", "local", "transfer"],
    "algorithms.fedavg": ["fedadagrad", "fedadam", "fedavg", "fedavgm", "fedprox", "fedyogi"],
    "algorithms.feddle.central": ["CentralAnchor"],
    "algorithms.feddle.search": ["Search", "feddle", "feddle_plus"],
    "algorithms.hybrid": ["fed_ft", "feddf", "hfcl"],
    "algorithms.local_global": ["lg_fedavg", "local_global"],
    "algorithms.mixed": ["Centre", "Population", "example_transfer", "gradient_1way", "gradient_2way", "parallel"],
    "algorithms.mtl": ["mtl"],
    "backends.simulator.engine": ["Simulator"],
    "backends.distributed.engine": ["Distributed"],
    "backends.distributed.ranks": ["join_ranks"],
    "core.batches": ["Batching"],
    "core.checkpoint": ["Checkpoints", "save_params"],
    "core.algorithm": ["Algorithm", "Message", "Reply", "Server", "Upload"],
    "data": ["CentralData", "FederatedData", "load_source", "spread"],
    "core.delays": ["Dropouts", "HalfNormal", "LogNormal", "Scripted", "SpeedClasses", "Trace"],
    "errors": ["InputError", "RunStopped"],
    "core.train": ["LocalTrainer"],
    "core.losses": ["binary_cross_entropy", "cross_entropy", "squared_error"],
    "evaluate.metrics": ["evaluator"],
    "core.model": ["Model"],
    "core.optim": ["Optimizer", "adagrad", "adam", "sgd", "yogi"],
    "core.loop": ["Record", "Result"],
    "backends.run": ["run"],
    "core.schedule": ["Schedule"],
    "experiments.task": ["Task"],
    "experiments.using": ["export", "load"],
    "experiments.answering": ["predict"],
    "experiments.api": ["Comparison", "advise", "compare", "probe", "score", "train", "tune"],
}
_MODULES = {
    "lookups": "models.bags",
    "trackers": "experiments.trackers",
    "tree": "core.tree",
}
"""Modules that users call by a shorter name."""
_HOME = {name: f"mixfed.{home}" for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 (in the order of _HOMES; a test compares the two)
    "ALGORITHMS", "Setup",
    "ca2fl", "fedasync", "fedbuff",
    "center", "local", "transfer",
    "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedprox", "fedyogi",
    "CentralAnchor", "Search", "feddle", "feddle_plus", "fed_ft", "feddf", "hfcl",
    "lg_fedavg", "local_global",
    "Centre", "Population", "example_transfer", "gradient_1way", "gradient_2way", "parallel", "mtl",
    "Simulator", "Distributed", "join_ranks", "Batching", "Checkpoints", "save_params",
    "Algorithm", "Message", "Reply", "Server", "Upload",
    "CentralData", "FederatedData", "load_source", "spread",
    "Dropouts", "HalfNormal", "LogNormal", "Scripted", "SpeedClasses", "Trace",
    "InputError", "RunStopped", "LocalTrainer",
    "binary_cross_entropy", "cross_entropy", "squared_error",
    "evaluator", "Model", "Optimizer", "adagrad", "adam", "sgd", "yogi",
    "Record", "Result", "run", "Schedule",
    "Task", "export", "load", "predict", "Comparison", "advise", "compare", "probe", "score", "train", "tune",
]  # fmt: skip


class _Package(ModuleType):
    """Functions that share the name of their module (``run``) win: Python would otherwise put the module here."""

    def __getattr__(self, name: str) -> Any:
        if name in _MODULES:
            return import_module(f"mixfed.{_MODULES[name]}")
        if name == "__version__":
            return version("mixfed")
        if name not in _HOME:
            raise AttributeError(f"module 'mixfed' has no attribute '{name}'")
        value = getattr(import_module(_HOME[name]), name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*__all__, *_MODULES, "__version__"]


sys.modules[__name__].__class__ = _Package
