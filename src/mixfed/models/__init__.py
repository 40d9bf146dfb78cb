"""Small, readable networks, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from mixfed.models.networks import CharacterGRU, cnn, linear, mlp

MODELS: dict[str, Callable[..., nn.Module]] = {"linear": linear, "mlp": mlp, "cnn": cnn, "gru": CharacterGRU}

__all__ = ["MODELS", "CharacterGRU", "cnn", "linear", "mlp"]
