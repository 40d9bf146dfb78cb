"""Features in the place of examples: parts of the network that do not train are run once, and not in every round.

An example is known by its numbers, as the network gets them. So features that are kept serve every seed, split and
label noise, and a network with other weights or other parts has a file of its own.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mixfed.core.batches import gather
from mixfed.core.device import usable_device
from mixfed.core.files import write_atomically
from mixfed.data._arrays import Arrays
from mixfed.data._files import load_npz
from mixfed.data.scenario import Scenario
from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError, explained
from mixfed.experiments.networks import sizes_of, whole_network
from mixfed.experiments.recipe import Recipe
from mixfed.models.chain import Chain

AT_ONCE = 64
"""So many examples are always run together, so that the last bits do not depend on which were known before."""

Data = TypeVar("Data", FederatedData, CentralData)


def with_features(recipe: Recipe, scenario: Scenario) -> Scenario:
    """The scenario with what ``model.cached`` makes of every example's ``x`` in its place."""
    if not recipe.model.trained:
        raise InputError("model.cached are parts that are run once; name the parts after them in model.trained.")
    network = Chain(whole_network(recipe, sizes_of(recipe, scenario)), recipe.model.cached)
    folder = Path(recipe.home, recipe.data.cache) if recipe.data.cache else None
    known = Features(network.to(usable_device(recipe.device)).eval(), folder)
    found = replace(
        scenario,
        clients=known.of(scenario.clients),
        test=known.of(scenario.test),
        own={name: known.of(data) for name, data in scenario.own.items()},
        central=None if scenario.central is None else known.of(scenario.central),
        validation=None if scenario.validation is None else known.of(scenario.validation),
        of_centre=None if scenario.of_centre is None else known.of(scenario.of_centre),
    )
    known.keep()
    return found


class Features:
    """What a frozen network makes of examples, each computed once; kept in a folder where there is one."""

    def __init__(self, network: nn.Module, folder: Path | None = None) -> None:
        self._network = network
        self._file = folder and folder / f"features-{_fingerprint(network)}.npz"
        self._known: dict[bytes, NDArray[np.float32]] = {}
        if self._file and self._file.is_file():
            stored = load_npz(self._file, ["examples", "features"])
            if stored["examples"].dtype != np.uint8 or len(stored["examples"]) != len(stored["features"]):
                raise InputError(f"{self._file} is damaged; remove it, and the features are computed anew.")
            self._known = dict(zip(map(bytes, stored["examples"]), stored["features"], strict=True))
        self._stored = len(self._known)

    def of(self, data: Data) -> Data:
        """The data with features in the place of ``x``."""
        if "x" not in data.arrays:
            raise InputError("model.cached makes features of the field 'x', and the examples have none.")
        parts = [self._answered(data, start) for start in range(0, data.examples, AT_ONCE)]
        if not parts:
            return data
        arrays: Arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return replace(data, arrays=arrays, prepare=None)

    def keep(self) -> None:
        """Writes what was computed beside what was known before."""
        if self._file is None or len(self._known) == self._stored:
            return
        buffer = io.BytesIO()
        examples = np.frombuffer(b"".join(self._known), np.uint8).reshape(len(self._known), -1)
        np.savez(buffer, examples=examples, features=np.stack(list(self._known.values())))
        write_atomically(self._file, buffer.getbuffer())

    def _answered(self, data: FederatedData | CentralData, start: int) -> Arrays:
        batch = gather(data, np.arange(start, min(start + AT_ONCE, data.examples)))
        inputs = batch["x"].numpy()
        names = [hashlib.blake2b(example.tobytes(), digest_size=16).digest() for example in inputs]
        new = [i for i, name in enumerate(names) if name not in self._known]
        if new:
            found = self._computed(batch["x"][new])
            self._known |= {names[i]: features for i, features in zip(new, found, strict=True)}
        return {name: x.numpy() for name, x in batch.items()} | {"x": np.stack([self._known[name] for name in names])}

    def _computed(self, inputs: Tensor) -> NDArray[np.float32]:
        full = torch.cat([inputs, inputs[:1].expand(AT_ONCE - len(inputs), *inputs.shape[1:])])
        device = next((p.device for p in self._network.parameters()), inputs.device)
        with torch.no_grad(), explained("The parts in model.cached do not take the examples"):
            found = self._network(full.to(device))[: len(inputs)]
            return np.asarray(found.float().cpu().numpy())


def _fingerprint(network: nn.Module) -> str:
    """Of the parts, and of all their weights."""
    digest = hashlib.blake2b(repr((getattr(network, "steps", ()), network)).encode(), digest_size=8)
    for name, tensor in network.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
