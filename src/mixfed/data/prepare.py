"""What turns a gathered batch into what a model takes; it works on any number of leading dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Pixels:
    """Bytes of images (…, channels, height, width) as float32 from 0 to 1, less ``mean``, over ``std``, per channel."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    field: str = "x"

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        images = batch[self.field].float() / 255
        if (self.mean, self.std) != ((0.0,), (1.0,)):
            images = (images - _channels(self.mean, images)) / _channels(self.std, images)
        return {**batch, self.field: images}


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    return like.new_tensor(values)[:, None, None]
