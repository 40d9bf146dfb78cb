"""What an adversary can read from clients' representations: the one they trained with, and one trained afterwards.

The post-fit adversary starts from scratch on frozen representations and has nobody playing against it. Where it does
better than the one that training knew, the representation only hid the attributes from that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mixfed import rng
from mixfed.algorithms.baselines import local
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.loop import Evaluate
from mixfed.core.model import Model
from mixfed.core.optim import adam
from mixfed.core.predict import answers
from mixfed.core.private import PrivateStore
from mixfed.core.train import LocalTrainer
from mixfed.core.tree import Params
from mixfed.data.batch import Batch
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.evaluate.metrics import area
from mixfed.evaluate.personal import models
from mixfed.models.networks import mlp
from mixfed.models.parts import Parts, adversary

Array = NDArray[Any]
Clients = NDArray[np.int64]


def adversary_test(algorithm: Algorithm, module: nn.Module, data: FederatedData) -> Evaluate:
    """The AUC of every client's own adversary on the client's own test examples, the mean over attributes.

    The answers of all clients are ranked together, so an adversary that knows nothing but how common an attribute is on
    its own device still helps the AUC where devices differ.
    """
    view = _view(algorithm.model, module, lambda m, batch: m.auxiliary(m.encoder(batch["x"])))

    def evaluate(params: Params, privates: PrivateStore) -> dict[str, float]:
        scores, truth = _asked(view, algorithm, data, np.flatnonzero(data.sizes() > 0), params, privates)
        return {"adversary_auc": mean_area(truth, scores)}

    return evaluate


def postfit_test(
    algorithm: Algorithm,
    module: nn.Module,
    train: FederatedData,
    test: FederatedData,
    *,
    hidden: Sequence[int] = (32, 32, 32),
    epochs: int = 20,
    seed: int = 0,
) -> Evaluate:
    """The AUC of adversaries that every client trains from scratch on its frozen representations, by the same means.

    Clients without examples of either kind are left out.
    """
    view = _view(algorithm.model, module, lambda m, batch: m.encoder(batch["x"]).flatten(1))

    def evaluate(params: Params, privates: PrivateStore) -> dict[str, float]:
        from mixfed.backends.run import run
        from mixfed.backends.simulator.engine import Simulator

        both = np.flatnonzero((train.sizes() > 0) & (test.sizes() > 0))
        if not len(both):
            raise InputError("No client has examples both to fit an adversary on and to ask it about.")
        known, unseen = (_represented(view, algorithm, data, both, params, privates) for data in (train, test))
        width, attributes = known.arrays["x"].shape[1], known.arrays["protected"].shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.key(seed, "postfit"))
            reader = Parts(nn.Identity(), nn.Identity(), mlp(width, attributes, hidden), adversary)
        model = Model(
            reader,
            lambda outputs, batch: outputs[1] if isinstance(outputs, tuple) else outputs.new_zeros(len(outputs)),
            forward=lambda m, batch: m(batch),
            dtype=algorithm.model.dtype,
            device=algorithm.model.device,
        )
        alone = local(LocalTrainer(model, adam(0.003), Batching(64, epochs=epochs)))
        fitted = run(alone, known, rounds=1, cohort=len(known), seed=seed, backend=Simulator("vmap"))
        assert fitted.privates is not None
        asked = _view(model, reader, lambda m, batch: m.auxiliary(batch["x"]))
        scores, truth = _asked(asked, alone, unseen, np.arange(len(both)), fitted.params, fitted.privates)
        return {"postfit_auc": mean_area(truth, scores)}

    return evaluate


def mean_area(truth: Array, scores: Array) -> float:
    """The mean of the areas under the ROC curve over attributes; an adversary that is worse than a coin counts."""
    return float(np.mean([area(truth[:, k], scores[:, k]) for k in range(truth.shape[1])]))


def _view(model: Model, module: nn.Module, forward: Callable[[Any, Batch], Any]) -> Model:
    """The same parameters, another output."""
    return Model(
        module,
        model.criterion,
        forward=forward,
        trainable=model.trainable.__contains__,
        dtype=model.dtype,
        device=model.device,
    )


def _each(
    view: Model, algorithm: Algorithm, data: FederatedData, clients: Clients, params: Params, privates: PrivateStore
) -> list[tuple[Array, Array]]:
    """What these clients' models answer about the clients' own examples, and the examples' protected attributes."""
    personal = algorithm.personal or (lambda params, private: params)
    found = []
    for client, own in models(personal, params, privates, clients):
        mine = CentralData(data.client(client), data.prepare)
        asked = np.concatenate([outputs.cpu().numpy() for _, outputs in answers(view, own, mine)])
        found.append((asked, np.asarray(mine.arrays["protected"])))
    return [one for part in privates.from_all(found) for one in part]


def _asked(
    view: Model, algorithm: Algorithm, data: FederatedData, clients: Clients, params: Params, privates: PrivateStore
) -> tuple[Array, Array]:
    scores, truth = zip(*_each(view, algorithm, data, clients, params, privates), strict=True)
    return np.concatenate(scores), np.concatenate(truth)


def _represented(
    view: Model, algorithm: Algorithm, data: FederatedData, clients: Clients, params: Params, privates: PrivateStore
) -> FederatedData:
    """These clients' examples as their models represent them, as clients 0, 1, …"""
    each = _each(view, algorithm, data, clients, params, privates)
    return FederatedData.from_datasets([{"x": h, "protected": protected} for h, protected in each])
