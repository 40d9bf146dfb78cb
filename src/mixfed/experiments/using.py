"""Using a trained model: the network of a run folder, its answers, and other programs' formats."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mixfed.core.algorithm import CLIENTS
from mixfed.core.checkpoint import Checkpoints, warn
from mixfed.core.files import write_atomically
from mixfed.core.private import PrivateStore
from mixfed.core.tree import Params
from mixfed.errors import InputError, explained, from_extra
from mixfed.experiments import objects
from mixfed.experiments.build import build
from mixfed.experiments.folder import RunFolder, identity
from mixfed.experiments.inputs import changed_since
from mixfed.experiments.networks import answering_network
from mixfed.experiments.recipe import Recipe
from mixfed.models.weights import read_weights

FORMATS = ("state_dict", "onnx")


def load(
    folder: str | Path, *, client: int | None = None, network: nn.Module | None = None, best: bool = False
) -> nn.Module:
    """The trained network of a finished run, ready to answer; with ``client`` the own model of that client.

    ``best`` asks for the best parameters on validation examples instead of the last, of a run with ``[stop] metric``.
    A run of Python objects does not hold its network, so ``network`` is given again: a module of the same kind.
    """
    run = RunFolder(folder)
    if run.finished() is None:
        raise InputError(f"{run.path} holds no finished run, so there is no trained model in it.")
    recipe = run.stored()
    if best and not run.best.is_file():
        raise InputError(f"The run in {run.path} kept no best model; say by which metric with stop.metric.")
    params = read_weights(run.best if best else run.model)
    if client is not None:
        params = _of_client(run, recipe, params, client)
    if network is not None and not isinstance(network, nn.Module):
        kind = f"the class {network.__name__}" if isinstance(network, type) else f"a {type(network).__name__}"
        raise InputError(f"The network is an object of torch.nn.Module, and not {kind}.")
    module = copy.deepcopy(network) if network is not None else _network(run, recipe)
    wrong = set(params) - set(module.state_dict())
    if wrong:
        raise InputError(f"The network has no parameter '{min(wrong)}', which the run in {run.path} trained.")
    with explained(f"The network does not fit the run in {run.path}"):
        module.load_state_dict(params, strict=False)
    return module.eval()


def export(folder: str | Path, to: str, out: str | Path | None = None, *, network: nn.Module | None = None) -> Path:
    """Writes the trained network for other programs: ``state_dict`` (torch.load) or ``onnx``. Returns the file."""
    if to not in FORMATS:
        raise InputError(f"A model is exported to {' or '.join(FORMATS)}, not to '{to}'.")
    module = load(folder, network=network)
    file = Path(out) if out else Path(folder) / ("model.pt" if to == "state_dict" else "model.onnx")
    write_atomically(file, _as_state_dict(module) if to == "state_dict" else _as_onnx(module, RunFolder(folder)))
    return file


def _as_state_dict(module: nn.Module) -> bytes:
    """What ``torch.load`` reads."""
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    return buffer.getvalue()


def _as_onnx(module: nn.Module, run: RunFolder) -> bytes:
    """The network as a function of a batch of any size."""
    for name in ("onnx", "onnxscript"):
        from_extra(name, "onnx", "An export to ONNX")
    batch = torch.export.Dim("batch")
    with _only_our_words(), explained("The network cannot be written as ONNX"):
        program = torch.onnx.export(
            module,
            (_example(run),),
            dynamo=True,
            input_names=["x"],
            output_names=["outputs"],
            dynamic_shapes=({0: batch},),
            verbose=False,
        )
        assert program is not None
        return bytes(program.model_proto.SerializeToString())


@contextmanager
def _only_our_words() -> Iterator[None]:
    """The exporter tells of packages that are not installed and of its own deprecated parts: nothing for its user."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def _example(run: RunFolder) -> Tensor:
    """Two inputs of the kind that the network takes."""
    known = run.known_facts().get("network", {}).get("input")
    if known is None:
        raise InputError(f"The network of the run in {run.path} takes more than one field, so ONNX cannot hold it.")
    return torch.zeros((2, *known["shape"]), dtype=getattr(torch, known["dtype"]))


def _network(run: RunFolder, recipe: Recipe) -> nn.Module:
    """The network as it was before the training."""
    if recipe.model.name.startswith(f"{objects.__name__}:"):
        raise InputError(f"The run in {run.path} is of Python objects; give its network again, with network=….")
    if recipe.auxiliary.kind != "none":
        return copy.deepcopy(build(recipe).algorithm.model.network())
    for name in changed_since(recipe):
        warn(f"The file {name} has changed since the run in {run.path} began, so its network may answer otherwise.")
    return answering_network(recipe, run.known_facts().get("network", {}).get("sizes", {}))


def _of_client(run: RunFolder, recipe: Recipe, params: Params, client: int) -> Params:
    """The parameters of a client's own model."""
    algorithm = build(recipe).algorithm
    if algorithm.personal is None:
        raise InputError(f"Clients of {recipe.algorithm} have no models of their own; leave out the client.")
    saved: Any = Checkpoints(run.checkpoints, identity=identity(recipe)).load()
    if saved is None or "private" not in saved["backend"]:
        raise InputError(f"The checkpoints in {run.checkpoints} do not hold the models of clients.")
    untouched = algorithm.own.first(algorithm.model.initial())
    folder = run.checkpoints / "private" if recipe.simulator.private == "disk" else None
    privates = PrivateStore(lambda: untouched, folder)
    privates.restore(saved["backend"]["private"])
    trained = privates.seen(CLIENTS).tolist()
    if client not in trained:
        raise InputError(
            f"Client {client} never trained in the run in {run.path}; those of {len(trained)} clients did."
        )
    return algorithm.personal(params, privates.get(CLIENTS, client))
