"""Tiny files in the formats of the real ones, for sources that more than one test reads."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import numpy as np

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
        writer.writerow(["train", "2004-11-15", "12:18", user, f'message {number} of {user}, "well"'])
    (folder / "text" / "ubuntu_irc_by_user.csv.gz").write_bytes(gzip.compress(stream.getvalue().encode()))
    articles = [
        f"= Article {number} =\n\nArticle {number} is long.\nIt has == a part ==.\n" + f"Words {number}. " * 5 + "\n"
        for number in range(8)
    ]
    (folder / "text" / "wikipedia_excerpt.txt.gz").write_bytes(gzip.compress("\n".join(articles).encode()))


def write_celeba(folder: Path) -> None:
    """Twelve celebrities of six images in train, three in valid and in test, and one with a single image in each."""
    from datasets import Dataset, DatasetDict, Features, Image, Value

    features = Features({"image": Image(), "celeb_id": Value("int64")} | {name: Value("bool") for name in ATTRIBUTES})
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
