"""A vision transformer whose attention learns through low-rank adapters (LoRA), by ``transformers`` and ``peft``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mixfed.errors import InputError, from_extra
from mixfed.models.photographs import as_photographs
from mixfed.ranges import Count, Finite, within_ranges

PROJECTIONS = r".*\.(q_proj|v_proj|query|value)"
"""Queries and values, as newer and as older versions of ``transformers`` call them."""


@within_ranges()
class ViT(nn.Module):
    """``body`` is a ViT with frozen weights W and trainable adapters, Wx + (scale/rank)·BAx, in the projections of
    its queries and values; ``head`` is a linear layer on the class token. Only adapters and head train and travel.

    The weights come from a local ``folder`` in Hugging Face's format (config.json and the weights). The paper has rank
    4 and scale 8 on ViT-B/16. B starts at zero, so training starts at the published network.
    """

    def __init__(self, outputs: int, folder: str, rank: Count = 4, scale: Finite = 8.0) -> None:
        super().__init__()
        transformers, peft = (
            from_extra("transformers", "vit", "The network 'vit'"),
            from_extra("peft", "vit", "The network 'vit'"),
        )
        place = Path(folder)
        config = place / "config.json"
        if not config.is_file() or _told(config).get("model_type") != "vit":
            raise InputError(f"The folder '{folder}' has no config.json of a vision transformer (model_type 'vit').")
        body = _body(transformers, place)
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


def _body(transformers: Any, folder: Path) -> Any:
    try:
        body, found = transformers.ViTModel.from_pretrained(
            folder, local_files_only=True, add_pooling_layer=False, output_loading_info=True
        )
    except Exception as error:  # files that are damaged make the library fail in any way
        told = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(f"'{folder}' holds no vision transformer that can be loaded: {told}.") from error
    if found["missing_keys"]:
        raise InputError(f"The weights in '{folder}' are of another network: there is no {min(found['missing_keys'])}.")
    return body


def _colours(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation that the network was trained with; 0.5 where the folder does not say."""
    file = folder / "preprocessor_config.json"
    told = _told(file) if file.is_file() else {}
    mean, std = (told.get(name, [0.5, 0.5, 0.5]) for name in ("image_mean", "image_std"))
    for values in (mean, std):
        if not isinstance(values, list) or len(values) != 3 or not all(isinstance(v, int | float) for v in values):
            raise InputError(f"'{file}' needs three numbers as image_mean and as image_std.")
    if not all(v > 0 for v in std):
        raise InputError(f"'{file}' has an image_std that is not above 0.")
    return tuple(mean), tuple(std)


def _told(file: Path) -> dict[str, Any]:
    """The settings in a JSON file."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"'{file}' cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"'{file}' is not a JSON file: {str(error).splitlines()[0]}.") from error
    if not isinstance(told, dict):
        raise InputError(f"'{file}' holds no settings by name.")
    return told
