"""Small, readable networks, by name; a network's module is imported when the network is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mixfed.deferred import Deferred

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
