"""A small table of a user's own, in every kind of file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

COLOURS, ANIMALS = ["blue", "green", "red"], ["cat", "dog", "owl"]
Table = dict[str, Any]


def table(rows: int = 60, seed: int = 0, people: int = 6) -> Table:
    """Sizes, a colour, an animal that follows from both, and whose each row is."""
    draw = np.random.default_rng(seed)
    sizes, colours = draw.normal(50, 20, rows).round(3), draw.integers(0, 3, rows)
    kinds = (colours + (sizes > 50)) % 3
    return {
        "who": [f"p{i % people}" for i in range(rows)],
        "size": sizes.tolist(),
        "colour": [COLOURS[i] for i in colours],
        "animal": [ANIMALS[i] for i in kinds],
    }


def write(file: Path, given: Table) -> Path:
    """The table in a file of the kind that its name says; a name without one is a Hugging Face folder."""
    import pyarrow
    from pyarrow import csv, feather, ipc, parquet

    columns = pyarrow.table(given)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".npz":
        np.savez(file, **{name: np.array(values) for name, values in given.items()})
    elif ".csv" in file.suffixes:
        with pyarrow.output_stream(file, compression="detect") as stream:
            csv.write_csv(columns, stream)
    elif file.suffix == ".parquet":
        parquet.write_table(columns, file)
    elif file.suffix == ".feather":
        feather.write_feather(columns, file)
    elif file.suffix == ".arrow":
        with ipc.new_stream(file, columns.schema) as stream:
            stream.write_table(columns)
    else:
        from datasets import Dataset

        Dataset.from_dict(given).save_to_disk(file)
    return file


def by_person(given: Table) -> dict[str, Table]:
    """The rows of each person, without the column that says whose they are."""
    found: dict[str, Table] = {}
    for row, person in enumerate(given["who"]):
        mine = found.setdefault(person, {name: [] for name in given if name != "who"})
        for name, values in mine.items():
            values.append(given[name][row])
    return found


def tokenizer(file: Path, words: list[str]) -> None:
    """A tokenizer that knows these words, as the library of that name writes it."""
    vocabulary = {"[UNK]": 0} | {word: number for number, word in enumerate(words, 1)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    told = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    told |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model}
    file.write_text(json.dumps(told))
