"""Faces, smiling or not, with the person in the picture as the natural client."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mixfed.data._arrays import Arrays, take, whole_numbers
from mixfed.data._files import load_npz, reading
from mixfed.data.images import as_bytes
from mixfed.data.prepare import Pixels
from mixfed.data.sources.base import Source, find
from mixfed.errors import InputError

DESCRIPTION = "faces, smiling or not, 32 x 32 grey; 13,165 images, 12,194 of them of 5,508 known people"
OBTAIN = "github.com/hromi/SMILEsmileD, as one .npz file with arrays x, smile and identity"


def load(folder: Path | None = None, keep_unknown: bool = False, centred: bool = False) -> Source:
    """From ``faces_smile_32.npz``. All is in the training part, for a test is of people held out by the user.

    Images of unknown people (identity -1) are dropped, or kept as those of one client -1. Pixels lie in [0, 1], or,
    ``centred``, in [-2, 2], which is better conditioned.
    """
    file = find(folder, OBTAIN, "faces_smile_32.npz")
    arrays = load_npz(file, ["x", "smile", "identity"])
    with reading(file):
        people = whole_numbers(arrays["identity"], f"'identity' in '{file}'")
        images = as_bytes(arrays["x"][:, None], (1, 32, 32), f"the images in '{file}'")
        fields: Arrays = {"x": images, "y": whole_numbers(arrays["smile"], f"'smile' in '{file}'")}
        if {values.shape for values in (people, fields["y"])} != {(len(images),)}:
            raise InputError(
                f"'{file}' needs one number in 'smile' and in 'identity' for each of {len(images):,} images"
            )
        kept = np.flatnonzero((people >= 0) | keep_unknown)
        return Source(
            train=take(fields, kept),
            test=take(fields, np.empty(0, np.int64)),
            prepare=Pixels((0.5,), (0.25,)) if centred else Pixels(),
            classes=2,
            natural_clients={"train": people[kept], "test": people[:0]},
            description=DESCRIPTION,
            licence="none stated; photographs of real people from Labeled Faces in the Wild, research use",
            names={"y": ("not smiling", "smiling")},
        )
