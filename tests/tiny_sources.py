"""Tiny files in the formats of the real ones, for sources that more than one test reads."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

ATTRIBUTES = ("Male", "Smiling", "Young")


def write_chat_wiki(folder: Path) -> None:
    """Eight users of three messages each, one of a single message, a bot; eight articles."""
    (folder / "text").mkdir()
    users = [*(f"user {number}" for number in range(8)), "ubottu"]
    rows = [(user, number) for number in range(3) for user in users] + [("rare", 0)]
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(["split", "date", "time", "user", "text"])
    for user, number in rows:
        writer.writerow(["train", "2004-11-15", "12:18", user, f'message {number} of {user}, "well"{".?!"[number]}'])
    (folder / "text" / "ubuntu_irc_by_user.csv.gz").write_bytes(gzip.compress(stream.getvalue().encode()))
    articles = [
        f"= Article {number} =\n\nArticle {number} is long.\nIt has == a part ==.\n" + f"Words {number}. " * 5 + "\n"
        for number in range(8)
    ]
    (folder / "text" / "wikipedia_excerpt.txt.gz").write_bytes(gzip.compress("\n".join(articles).encode()))


def write_celeba(folder: Path) -> None:
    """Twelve celebrities of six images in train, three in valid and in test, and one with a single image in each."""
    from datasets import Dataset, DatasetDict, Features, Value
    from datasets import Image as ImageFeature

    features = Features(
        {"image": ImageFeature(), "celeb_id": Value("int64")} | {name: Value("bool") for name in ATTRIBUTES}
    )
    random = np.random.default_rng(0)

    def split(people: list[int]) -> Dataset:
        owners = [*np.repeat(people, 6), people[0] + 50]
        smiling = [number % 2 == 0 for number in range(len(owners))]
        columns = {
            "image": [_picture(random, smile) for smile in smiling],
            "celeb_id": owners,
            "Male": [False] * len(owners),
            "Smiling": smiling,
            "Young": [True] * len(owners),
        }
        return Dataset.from_dict(columns, features)

    parts = {"train": [*range(12)], "valid": [20, 21, 22], "test": [30, 31, 32]}
    DatasetDict({name: split(people) for name, people in parts.items()}).save_to_disk(folder / "celeba")


def _picture(random: np.random.Generator, bright: bool) -> dict[str, bytes]:
    from PIL import Image

    pixels = random.integers(128 if bright else 0, 256 if bright else 128, (218, 178, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return {"bytes": stream.getvalue()}


def write_movielens(folder: Path, file: str, between: str) -> None:
    """Six people who rate five movies each."""
    lines = [
        between.join(map(str, (user, 1 + (7 * user + 3 * time) % 30, 4, 1000 + time)))
        for user in range(1, 7)
        for time in range(5)
    ]
    (folder / file).parent.mkdir()
    (folder / file).write_text("\n".join(lines) + "\n")


def write_vqa(folder: Path) -> None:
    """Twelve images in train2014 and four in val2014, with the schema of VQA 2.0."""
    draw = np.random.default_rng(0)
    for part, count in (("train2014", 12), ("val2014", 4)):
        (folder / "vqa" / part).mkdir(parents=True)
        questions, annotations = [], []
        for number in range(count):
            colour = number % 2
            pixels = np.clip(draw.normal(size=(20, 24, 3)) * 20 + [250 * colour, 40, 250 - 250 * colour], 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "vqa" / part / f"COCO_{part}_{number:012d}.jpg")
            asked = {"image_id": number, "question_id": 10 * number}
            questions.append(asked | {"question": "What colour is the wall?"})
            annotations.append(asked | {"multiple_choice_answer": ["blue", "red"][colour], "question_type": "what"})
        (folder / "vqa" / f"v2_OpenEnded_mscoco_{part}_questions.json").write_text(json.dumps({"questions": questions}))
        (folder / "vqa" / f"v2_mscoco_{part}_annotations.json").write_text(json.dumps({"annotations": annotations}))
