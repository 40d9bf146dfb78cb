"""CelebA: faces of celebrities, smiling or not, with the celebrity as the natural client."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mixfed.data._arrays import Arrays, join, take
from mixfed.data.prepare import Pixels
from mixfed.data.readers import central_from_huggingface
from mixfed.data.sources.base import Source, find
from mixfed.errors import InputError

DESCRIPTION = "faces of 10,177 celebrities, smiling or not, colour, any size; 182,637 + 19,962"
OBTAIN = 'Hugging Face: datasets.load_dataset("flwrlabs/celeba").save_to_disk("celeba") (about 11 GB)'


def load(folder: Path | None = None, size: int = 28, attribute: str = "Smiling", min_images: int = 5) -> Source:
    """From ``celeba/``, a Hugging Face dataset written with ``save_to_disk``, with splits train, valid and test.

    Images are averaged down to ``size`` by ``size`` as they are read, and the label is whether they have the
    ``attribute`` (one of CelebA's 40). Training is train and valid together; no celebrity is in two splits.
    Celebrities with fewer than ``min_images`` images are left out, as LEAF and the papers do.
    """
    if size < 1:
        raise InputError(f"images have a size of at least 1, not {size}")
    place = find(folder, OBTAIN, "celeba")
    train = _people_with(min_images, join([_read(place, split, size, attribute) for split in ("train", "valid")]))
    test = _people_with(min_images, _read(place, "test", size, attribute))
    return Source(
        natural_clients={"train": train.pop("person"), "test": test.pop("person")},
        train=train,
        test=test,
        prepare=Pixels(),
        classes=2,
        description=DESCRIPTION,
        licence="CelebA dataset release agreement: research and other non-commercial use only",
        names={"y": (f"not {attribute}", attribute)},
    )


def _read(place: Path, split: str, size: int, attribute: str) -> Arrays:
    columns = {"x": "image", "y": attribute, "person": "celeb_id"}
    arrays = central_from_huggingface(place, columns, split=split, size=(size, size)).arrays
    return arrays | {"y": arrays["y"].astype(np.int64)}


def _people_with(min_images: int, arrays: Arrays) -> Arrays:
    _, owners, counts = np.unique(arrays["person"], return_inverse=True, return_counts=True)
    return take(arrays, np.flatnonzero(counts[owners] >= min_images))
