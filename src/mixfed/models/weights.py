"""Published weights from a local file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mixfed.errors import InputError


def load_weights(network: nn.Module, file: str | Path) -> None:
    """Puts the weights of a file (.safetensors, or .pth as torch.save writes a state_dict) into the network.

    Names and shapes must be the network's, but for the last linear layer: where its shape differs, because the weights
    were trained for other classes, it keeps its fresh start.
    """
    path = Path(file)
    given, wanted = _read(path), network.state_dict()
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    head = {name for name in wanted if linear and name.startswith(f"{linear[-1]}.")}
    if any(name in given and given[name].shape != wanted[name].shape for name in head):
        given = {name: x for name, x in given.items() if name not in head} | {name: wanted[name] for name in head}
    for told, names in (
        ("has no '{}', which the network has", wanted.keys() - given.keys()),
        ("has '{}', which the network has not", given.keys() - wanted.keys()),
        ("has '{}' in another shape", {n for n in wanted.keys() & given.keys() if wanted[n].shape != given[n].shape}),
    ):
        if names:
            raise InputError(f"The weights in {path} are of another network: the file {told.format(min(names))}.")
    network.load_state_dict(given)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        given = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"The weights {path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # a file that is none makes torch's reader fail in any way
        raise InputError(f"{path} is not a file of weights in .safetensors or .pth.") from error
    if not isinstance(given, dict) or not all(isinstance(n, str) and isinstance(x, Tensor) for n, x in given.items()):
        raise InputError(f"{path} does not hold weights by name, as a state_dict does.")
    return given
