"""Fashion-MNIST: articles of clothing in the format of MNIST."""

from __future__ import annotations

from pathlib import Path

from mixfed.data.prepare import Pixels
from mixfed.data.sources import idx
from mixfed.data.sources.base import Source

DESCRIPTION = "articles of clothing, 10 classes, 28 x 28 grey; 60,000 + 10,000"
OBTAIN = "the Debian package dataset-fashion-mnist or github.com/zalandoresearch/fashion-mnist"
NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def load(folder: Path | None = None) -> Source:
    """From ``fashion-mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte``, plain or gzipped."""
    return Source(
        train=idx.load_part(folder, OBTAIN, "fashion-mnist", "train"),
        test=idx.load_part(folder, OBTAIN, "fashion-mnist", "t10k"),
        prepare=Pixels(),
        classes=10,
        natural_clients=None,
        description=DESCRIPTION,
        licence="MIT",
        names={"y": NAMES},
    )
