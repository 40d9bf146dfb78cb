"""Visual question answering (VQA 2.0), read from its own files: questions, annotations and COCO images."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from mixfed.data._arrays import Arrays
from mixfed.data._disk import reserve
from mixfed.data._files import content, reading
from mixfed.data.sources.base import Source, find
from mixfed.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

DESCRIPTION = "questions about images and the most frequent answers; VQA 2.0 on COCO images"
WORDS = 10_000
OBTAIN = "visualqa.org/download.html (questions, annotations and images of train2014 and val2014)"


def load(folder: Path | None = None, size: int = 64, words: int = 16, answers: int = 1000, most: int = 0) -> Source:
    """From ``vqa/v2_OpenEnded_mscoco_{train,val}2014_questions.json`` and the annotations
    ``vqa/v2_mscoco_{train,val}2014_annotations.json`` and images ``vqa/{train,val}2014/COCO_{train,val}2014_*.jpg``.

    ``x`` is the number of the image, which a batch has scaled to ``size`` × ``size``; ``question`` the first ``words``
    words as numbers (0 pads, 1 is a word that is rare in training); ``y`` one of the ``answers`` most frequent answers
    of the training part: questions with other answers are left out. ``most`` limits the questions of each part, 0
    takes all.
    """
    if min(size, words, answers) < 1 or most < 0:
        raise InputError("size, words and answers must be at least 1")
    parts = {name: _read(folder, file, most) for name, file in (("train", "train2014"), ("test", "val2014"))}
    frequent = [a for a, _ in Counter(p["answer"] for p in parts["train"]).most_common(answers)]
    counts = Counter(word for p in parts["train"] for word in p["words"])
    usual = sorted(word for word, count in counts.most_common(WORDS - 2) if count > 1)
    known = {word: number for number, word in enumerate(usual, start=2)}
    files = sorted({p["image"] for found in parts.values() for p in found})
    numbers = {file: number for number, file in enumerate(files)}
    arrays = {name: _arrays(found, frequent, known, numbers, words) for name, found in parts.items()}
    return Source(
        train=arrays["train"],
        test=arrays["test"],
        prepare=Pictures(files, size),
        classes=len(frequent),
        natural_clients=None,
        description=DESCRIPTION,
        licence="annotations CC BY 4.0; images under Flickr's terms",
        names={"y": tuple(frequent), "question": ("", "unknown", *known)},
    )


def _read(folder: Path | None, part: str, most: int) -> list[dict[str, Any]]:
    asked = find(folder, OBTAIN, f"vqa/v2_OpenEnded_mscoco_{part}_questions.json")
    told = find(folder, OBTAIN, f"vqa/v2_mscoco_{part}_annotations.json")
    questions = _records(asked, "questions", question_id=int, image_id=int, question=str)
    annotations = _records(told, "annotations", question_id=int, multiple_choice_answer=str)
    answer = {a["question_id"]: a["multiple_choice_answer"] for a in annotations}
    found = []
    for question in questions[: most or None]:
        if question["question_id"] not in answer:
            raise InputError(f"'{told}' has no answer to question {question['question_id']} of '{asked}'.")
        image = asked.parent / part / f"COCO_{part}_{question['image_id']:012d}.jpg"
        words = re.findall(r"[a-z0-9']+", question["question"].lower())
        found.append({"image": image, "words": words, "answer": answer[question["question_id"]]})
    return found


def _records(file: Path, name: str, **kinds: type) -> list[dict[str, Any]]:
    """The records of a JSON file, each of which has values of these kinds."""
    with reading(file):
        table = json.loads(content(file))
        records = table.get(name) if isinstance(table, dict) else None
        if not isinstance(records, list) or not records:
            raise ValueError(f"it has no list of '{name}'")
        for number, record in enumerate(records):
            for key, kind in kinds.items():
                if not isinstance(record, dict) or not isinstance(record.get(key), kind):
                    raise ValueError(f"entry {number} of '{name}' has no {key} that is {_WORDS[kind]}")
        return records


_WORDS = {int: "a whole number", str: "text"}


def _arrays(
    found: list[dict[str, Any]], frequent: list[str], known: dict[str, int], files: Mapping[Path, int], words: int
) -> Arrays:
    place = {answer: number for number, answer in enumerate(frequent)}
    kept = [f for f in found if f["answer"] in place]
    images = np.array([files[f["image"]] for f in kept], np.int64)
    text = np.zeros((len(kept), words), np.int64)
    for number, f in enumerate(kept):
        numbers = [known.get(word, 1) for word in f["words"][:words]]
        text[number, : len(numbers)] = numbers
    return {"x": images, "question": text, "y": np.array([place[f["answer"]] for f in kept], np.int64)}


class Pictures:
    """Numbers of images as the images, float32 from 0 to 1.

    Several questions share an image, and all images at once would fill the memory (VQA at 224 pixels: 18 GB). So a file
    is read when its image is first wanted, and the pixels are kept in a temporary file that is memory-mapped. The file
    takes the room of those images that were wanted.
    """

    def __init__(self, files: Sequence[Path], size: int) -> None:
        for image in files:
            if not image.is_file():
                raise InputError(f"The image {image} is missing.")
        self._files = files
        self._known = np.zeros(len(files), np.bool_)
        self._stored = cast(BinaryIO, TemporaryFile())  # noqa: SIM115, for it is written into as long as this lives
        self._pixels = np.memmap(self._stored, np.uint8, "w+", shape=(len(files), 3, size, size))

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        import torch

        numbers = batch["x"].cpu().numpy()
        for number in np.unique(numbers[~self._known[numbers]]).tolist():
            pixels = self._read(self._files[number])
            reserve(self._stored, number * pixels.size, (number + 1) * pixels.size, Path(gettempdir()))
            self._pixels[number] = pixels
            self._known[number] = True
        pixels = torch.from_numpy(self._pixels[numbers]).to(batch["x"].device)
        return {**batch, "x": pixels.to(torch.float32) / 255}

    def _read(self, file: Path) -> Any:
        from PIL import Image

        try:
            with reading(file), Image.open(file) as image:
                return np.asarray(image.convert("RGB").resize(self._pixels.shape[2:])).transpose(2, 0, 1)
        except Image.DecompressionBombError as error:
            raise InputError(f"'{file}' cannot be read ({error}); scale the image down first") from error
