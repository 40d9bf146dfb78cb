"""A vision transformer whose attention learns through low-rank adapters (LoRA), by ``transformers`` and ``peft``."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mixfed.errors import InputError
from mixfed.models.photographs import as_photographs

PROJECTIONS = r".*\.(q_proj|v_proj|query|value)"
"""Queries and values, as newer and as older versions of ``transformers`` call them."""


class ViT(nn.Module):
    """``body`` is a ViT with frozen weights W and trainable adapters, Wx + (scale/rank)·BAx, in the projections of
    its queries and values; ``head`` is a linear layer on the class token. Only adapters and head train and travel.

    The weights come from a local ``folder`` in Hugging Face's format (config.json and the weights). The paper has rank
    4 and scale 8 on ViT-B/16. B starts at zero, so training starts at the published network.
    """

    def __init__(self, outputs: int, folder: str, rank: int = 4, scale: float = 8.0) -> None:
        super().__init__()
        transformers, peft = _extra("transformers"), _extra("peft")
        place = Path(folder)
        if not (place / "config.json").is_file():
            raise InputError(f"The folder '{folder}' (model.folder) has no config.json of a vision transformer.")
        try:
            body = transformers.ViTModel.from_pretrained(place, local_files_only=True, add_pooling_layer=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(
                f"'{folder}' holds no vision transformer that can be loaded: {str(error).splitlines()[0].rstrip('.')}."
            ) from error
        adapters = peft.LoraConfig(r=rank, lora_alpha=scale, target_modules=PROJECTIONS)
        self.body = peft.inject_adapter_in_model(adapters, body)
        self.size = int(body.config.image_size)
        self.mean, self.std = _colours(place)
        self.head = nn.Linear(body.config.hidden_size, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, outputs] for images of values 0 to 1."""
        tokens: Any = self.body(as_photographs(images, self.size, self.mean, self.std))
        logits: Tensor = self.head(tokens.last_hidden_state[:, 0])
        return logits


def _colours(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that the network was trained with; 0.5 where the folder does not say."""
    file = folder / "preprocessor_config.json"
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    half = [0.5, 0.5, 0.5]
    return tuple(told.get("image_mean", half)), tuple(told.get("image_std", half))


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError("The network 'vit' needs an extra: pip install 'mixfed[vit]'.") from error
