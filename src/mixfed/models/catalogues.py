"""Networks by name from torchvision and timm: ``torchvision:resnet18``, ``timm:mobilenetv3_small_100``.

Both are extras, imported when a network of theirs is made. They start from random weights; published ones come from a
file (:mod:`mixfed.models.weights`), so that nothing is downloaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from mixfed.errors import InputError, from_extra


def from_torchvision(name: str) -> Callable[..., nn.Module]:
    """What makes torchvision's network of that name, with as many outputs as wanted and the network's own settings."""

    def make(outputs: int, **settings: Any) -> nn.Module:
        models = _package("torchvision", "torchvision.models")
        _require(name, "torchvision", models.list_models(module=models))  # not those in parts, for boxes and masks
        network: nn.Module = models.get_model(name, weights=None, num_classes=outputs, **settings)
        return network

    return make


def from_timm(name: str) -> Callable[..., nn.Module]:
    """What makes timm's network of that name, for so many outputs and channels and with the network's own settings."""

    def make(outputs: int, channels: int = 3, **settings: Any) -> nn.Module:
        timm = _package("timm", "timm")
        _require(name, "timm", timm.list_models())
        network: nn.Module = timm.create_model(
            name, pretrained=False, num_classes=outputs, in_chans=channels, **settings
        )
        return network

    return make


CATALOGUES: dict[str, Callable[[str], Callable[..., nn.Module]]] = {
    "torchvision": from_torchvision,
    "timm": from_timm,
}


_COMPILED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators that torchvision describes to PyTorch even where its compiled part, which has them, does not load."""


def _package(extra: str, module: str) -> Any:
    """The module; a torchvision whose compiled part is for another device serves too: few networks need that part."""
    try:
        try:
            return from_extra(module, extra, f"A network of {extra}")
        except RuntimeError as error:
            if "operator torchvision::" not in str(error):
                raise
            _declare_operators()
            return from_extra(module, extra, f"A network of {extra}")
    except InputError:
        raise
    except Exception as error:  # a build for another PyTorch fails in its own way
        line = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"{extra} does not work here ({line}); install its build for this PyTorch.") from error


@cache
def _declare_operators() -> Any:
    """Names torchvision's operators to PyTorch, which then lets it be imported; a network that calls one fails there.

    They are known as long as the library is kept.
    """
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in _COMPILED:
        library.define(operator)
    return library


def _require(name: str, package: str, known: Sequence[str]) -> None:
    if name not in known:
        (near,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0) or [""]
        near = f"did you mean '{package}:{near}'?"
        raise InputError(f"The package {package} has no network for classes called '{name}'; {near}")
