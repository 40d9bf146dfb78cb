"""Published weights from a local file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mixfed.errors import InputError


def load_weights(network: nn.Module, file: str | Path, parts: Mapping[str, str] | None = None) -> None:
    """Puts the weights of a file (.safetensors, or .pth as torch.save writes a state_dict) into the network.

    Names and shapes must be the network's, but for the last linear layer: where its shape differs, because the weights
    were trained for other classes, it keeps its fresh start.

    With ``parts`` only the parts of the network whose names begin with one of its keys take their weights from the
    file, where they begin with the key's value instead: ``{"body.": "encoder."}``. All else keeps its fresh start.
    """
    path = Path(file)
    given, wanted = read_weights(path), network.state_dict()
    if parts:
        wanted, given = _parts(path, wanted, given, parts)
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
    network.load_state_dict(given, strict=not parts)


def _parts(
    path: Path, wanted: dict[str, Tensor], given: dict[str, Tensor], parts: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the network's and of the file's weights those of the parts, by the network's names."""
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for inside, outside in parts.items():
        own = {name: x for name, x in wanted.items() if name.startswith(inside)}
        if not own:
            raise InputError(f"No weight of the network begins with '{inside}'; it has {', '.join(wanted)}.")
        there = {inside + name[len(outside) :]: x for name, x in given.items() if name.startswith(outside)}
        if not there:
            raise InputError(f"No weight in {path} begins with '{outside}'; it has {', '.join(given)}.")
        ours |= own
        theirs |= {name: x for name, x in there.items() if name in own}
    return ours, theirs


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a file by their names, or a sentence."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        given = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"The weights {path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # a file that is none makes torch's reader fail in any way
        raise InputError(f"{path} is not a file of weights in .safetensors or .pth.") from error
    if not isinstance(given, dict) or not all(isinstance(n, str) and isinstance(x, Tensor) for n, x in given.items()):
        inside = f" (it has {', '.join(map(str, [*given][:8]))}); save that alone" if isinstance(given, dict) else ""
        raise InputError(f"{path} does not hold weights by name, as a state_dict does{inside}.")
    return given
