"""Small, readable networks, by name; a network's module is imported when the network is built."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from mixfed.deferred import Deferred
from mixfed.ranges import Range

if TYPE_CHECKING:
    from torch import nn

_HOMES = {
    "linear": ("networks", "linear"),
    "mlp": ("networks", "mlp"),
    "cnn": ("networks", "cnn"),
    "lenet5": ("lenet", "lenet5"),
    "resnet18": ("resnet", "ResNet18"),
    "efficientnet_lite0": ("efficientnet", "efficientnet_lite0"),
    "vit": ("vit", "ViT"),
    "bilstm": ("bilstm", "BiLSTM"),
    "vqa": ("vqa", "QuestionAnswering"),
    "gru": ("networks", "CharacterGRU"),
    "dual_encoder": ("recommender", "DualEncoder"),
}
MODELS: dict[str, Deferred[nn.Module]] = {
    name: Deferred(f"mixfed.models.{module}", function) for name, (module, function) in _HOMES.items()
}

CROP = re.compile(r"crop ([1-9]\d*)")
ImageChange = Annotated[
    str,
    Range("'flip' or 'crop 4' (by up to 4 pixels)", lambda name: name == "flip" or CROP.fullmatch(name) is not None),
]
"""A random change of images in training (:mod:`mixfed.models.augment`)."""
