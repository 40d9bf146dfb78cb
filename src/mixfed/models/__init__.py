"""Small, readable networks, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from mixfed.models.bilstm import BiLSTM
from mixfed.models.lenet import lenet5
from mixfed.models.networks import CharacterGRU, cnn, linear, mlp
from mixfed.models.recommender import DualEncoder
from mixfed.models.resnet import ResNet18
from mixfed.models.vit import ViT
from mixfed.models.vqa import QuestionAnswering

MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "lenet5": lenet5,
    "resnet18": ResNet18,
    "vit": ViT,
    "bilstm": BiLSTM,
    "vqa": QuestionAnswering,
    "gru": CharacterGRU,
    "dual_encoder": DualEncoder,
}

__all__ = [
    "MODELS",
    "BiLSTM",
    "CharacterGRU",
    "DualEncoder",
    "QuestionAnswering",
    "ResNet18",
    "ViT",
    "cnn",
    "lenet5",
    "linear",
    "mlp",
]
