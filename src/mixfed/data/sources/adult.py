"""Adult: does a person of the 1994 census earn more than 50,000 dollars?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays
from mixfed.data._files import content, reading
from mixfed.data.sources.base import Source, find
from mixfed.errors import InputError

DESCRIPTION = "census income, 2 classes, 14 attributes as 108 numbers; 32,561 + 16,281, with race and sex kept apart"
OBTAIN = "UCI Adult (archive.ics.uci.edu/dataset/2/adult)"
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income"),
)
NUMERIC = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
CATEGORICAL = tuple(name for name in COLUMNS[:-1] if name not in NUMERIC)
PROTECTED = ("race", "sex")

Text = dict[str, NDArray[np.str_]]


def load(folder: Path | None = None, protected: Sequence[str] = ()) -> Source:
    """From ``adult/adult.data`` and ``adult/adult.test``, plain or gzipped.

    ``x`` has the numeric attributes, standardised by the training part, then one column per category; a missing
    value ("?") is a category. "race" and "sex" are also fields of their own, for measuring fairness.

    ``protected`` names columns, such as "race=White" and "sex=Male": they become the field "protected" (0 or 1 each),
    and ``x`` loses all columns of these attributes.
    """
    train = _read(find(folder, OBTAIN, "adult/adult.data"))
    test = _read(find(folder, OBTAIN, "adult/adult.test"))
    categories = {name: np.union1d(train[name], test[name]) for name in CATEGORICAL}
    numbers = np.stack([train[name].astype(np.float64) for name in NUMERIC], axis=1)
    mean, std = numbers.mean(axis=0), numbers.std(axis=0)
    std[std == 0] = 1
    columns = [f"{name}={value}" for name, values in categories.items() for value in values]
    names = (*NUMERIC, *columns)
    return Source(
        train=_hidden(_encode(train, categories, mean, std), names, protected),
        test=_hidden(_encode(test, categories, mean, std), names, protected),
        prepare=None,
        classes=2,
        natural_clients=None,
        description=DESCRIPTION,
        licence="CC BY 4.0",
        names={
            "x": tuple(name for name in names if not _told_by(name, protected)),
            "y": ("<=50K", ">50K"),
            **{name: tuple(categories[name].tolist()) for name in PROTECTED},
        },
    )


def _hidden(arrays: Arrays, names: Sequence[str], protected: Sequence[str]) -> Arrays:
    """The arrays with protected columns in a field of their own and nothing of their attributes in ``x``."""
    if not protected:
        return arrays
    for name in protected:
        if name not in names or "=" not in name:
            raise InputError(f"'{name}' is no category of the census; name one such as race=White or sex=Male")
    kept = [i for i, name in enumerate(names) if not _told_by(name, protected)]
    column = [list(names).index(name) for name in protected]
    return arrays | {"x": arrays["x"][:, kept], "protected": arrays["x"][:, column].astype(np.int64)}


def _told_by(name: str, protected: Sequence[str]) -> bool:
    return name.partition("=")[0] in {p.partition("=")[0] for p in protected}


def _read(file: Path) -> Text:
    """The columns of one file, as text; the test file has a comment line and a full stop after each label."""
    with reading(file):
        found = content(file)
        lines = [line.strip() for line in found.decode("ascii").splitlines()]
        rows = [line.rstrip(".").split(",") for line in lines if line and not line.startswith("|")]
        if not rows or any(len(row) != len(COLUMNS) for row in rows):
            raise ValueError(f"every line must have {len(COLUMNS)} values with commas between them")
        table = np.char.strip(np.array(rows))
        text: Text = dict(zip(COLUMNS, table.T, strict=True))
        np.stack([text[name] for name in NUMERIC]).astype(np.float64)  # fails here, where the file is known
        if not set(text["income"].tolist()) <= {"<=50K", ">50K"}:
            raise ValueError("the last value of a line must be <=50K or >50K")
        return text


def _encode(text: Text, categories: dict[str, NDArray[Any]], mean: NDArray[Any], std: NDArray[Any]) -> Arrays:
    numbers = np.stack([text[name].astype(np.float64) for name in NUMERIC], axis=1)
    one_hot = [text[name][:, None] == values for name, values in categories.items()]
    fields = {
        "x": np.concatenate([(numbers - mean) / std, *one_hot], axis=1).astype(np.float32),
        "y": (text["income"] == ">50K").astype(np.int64),
    }
    return fields | {name: np.searchsorted(categories[name], text[name]).astype(np.int64) for name in PROTECTED}
