"""How columns of a file become fields of examples: numbers, categories, classes and text.

What this takes (which categories there are, which classes, which characters) is learnt once from training files and
remembered, so that any other file is read in the same way. A category or a character that is met later and was not
known then is none of the known ones; a class that was not known is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays
from mixfed.data.columns import Columns, extra
from mixfed.errors import InputError

Labels = Literal["auto", "classes", "numbers", "standard"]
CHARACTERS = "characters"
MOST_CATEGORIES, MOST_CHARACTERS = 1000, 1000
UNKNOWN, FIRST = 1, 2
"""The number of an unknown character, and of the first known one; 0 pads."""


@dataclass(frozen=True)
class Encoding:
    """The columns of each field, and the known values of those that hold categories or classes.

    ``text`` is how texts in ``x`` become numbers: by ``characters``, which are numbered in their order here, or by a
    tokenizer in a file. ``length`` is how many numbers of a text are kept.
    """

    fields: dict[str, list[str]]
    values: dict[str, list[Any]] = field(default_factory=dict)
    labels: Labels = "auto"
    text: str = ""
    characters: str = ""
    length: int = 0

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, where labels are classes with names."""
        return tuple(str(value) for value in self.values.get("y", ()))

    @property
    def vocabulary(self) -> int | None:
        """How many different numbers a text has."""
        if not self.text:
            return None
        return FIRST + len(self.characters) if self.text == CHARACTERS else 1 + _tokenizer(self.text).get_vocab_size()

    def to_json(self) -> dict[str, Any]:
        """What is remembered, for a file; :meth:`from_json` makes the same of it."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Encoding:
        """What was remembered."""
        return cls(**told)

    def without_labels(self) -> Encoding:
        """The same for files that have no labels."""
        return replace(self, fields={name: columns for name, columns in self.fields.items() if name != "y"})

    def encode(self, columns: Columns, whose: str) -> Arrays:
        """The examples of a table; ``whose`` they are is told where a label is not known."""
        found: Arrays = {}
        for name, chosen in self.fields.items():
            if name == "y":
                found[name] = self._labels(columns[chosen[0]], chosen[0], whose)
            elif name == "x" and self.text:
                found[name] = padded(self.numbers(columns[chosen[0]]), self.length)
            elif name == "x":
                found[name] = self._features([(column, columns[column]) for column in chosen])
            else:
                found[name] = self._codes(columns[chosen[0]], chosen[0], whose)
        return found

    def numbers(self, texts: NDArray[Any]) -> list[NDArray[np.int64]]:
        """Each text as numbers, which are at least 1."""
        if self.text != CHARACTERS:
            return [np.array(found.ids, np.int64) + 1 for found in _tokenizer(self.text).encode_batch(texts.tolist())]
        place = {character: number for number, character in enumerate(self.characters, FIRST)}
        return [np.array([place.get(c, UNKNOWN) for c in text], np.int64) for text in texts.tolist()]

    def number_columns(self, like: Columns) -> NDArray[np.bool_]:
        """Which columns of ``x`` are numbers, and not one of a category's."""
        chosen = self.fields["x"]
        widths = [len(self.values[c]) if c in self.values else int(np.prod(like[c].shape[1:])) for c in chosen]
        return np.repeat([c not in self.values for c in chosen], widths)

    def _features(self, columns: Sequence[tuple[str, NDArray[Any]]]) -> NDArray[Any]:
        if len(columns) == 1 and columns[0][1].ndim > 1:
            return _as_array(*columns[0])
        parts = [_one_hot(x, self.values[c]) if c in self.values else _numbers(c, x) for c, x in columns]
        return np.concatenate(parts, axis=1)

    def _labels(self, column: NDArray[Any], name: str, whose: str) -> NDArray[Any]:
        column = column.reshape(len(column)) if column.shape[1:] == (1,) else column
        if "y" in self.values:
            return _positions(column, self.values["y"], name, whose)
        _require_numbers(name, column)
        whole = self.labels == "auto" and column.dtype.kind in "iu"
        return column.astype(np.int64 if whole else np.float32)

    def _codes(self, column: NDArray[Any], name: str, whose: str) -> NDArray[Any]:
        return _positions(column, self.values[name], name, whose) if name in self.values else column


def learn(
    tables: Sequence[Columns], fields: Mapping[str, list[str]], labels: Labels, text: str, length: int
) -> Encoding:
    """The encoding of these fields, from the training tables."""
    values: dict[str, list[Any]] = {}
    for name, chosen in fields.items():
        for column in chosen:
            together = [table[column] for table in tables]
            if name == "y":
                _refuse_one_hot(together[0], column)
            if name == "y" and (labels == "classes" or (labels == "auto" and _is_text(together[0], or_bool=True))):
                values["y"] = _known(together)
            elif name == "y" and _is_text(together[0]):
                raise InputError(f"the labels '{column}' are words, and no numbers; take labels = 'classes'")
            elif _is_text(together[0]) and not (name == "x" and text):
                _refuse_decimal_commas(together[0], column)
                values[column] = _known(together)
                if len(values[column]) > MOST_CATEGORIES:
                    told = f"the column '{column}' has {len(values[column]):,} different texts, too many for categories"
                    raise InputError(f"{told}; leave it out of the features, or read it as text")
    characters = ""
    if text:
        (column,) = fields["x"][:1]
        if len(fields["x"]) != 1 or not _is_text(tables[0][column]):
            raise InputError(f"Text is read from one column of texts, and the features are {', '.join(fields['x'])}")
        if length < 1:
            raise InputError(f"a text has a length of at least 1, not {length}")
        if text == CHARACTERS:
            counts = Counter(character for table in tables for line in table[column].tolist() for character in line)
            characters = "".join(sorted(character for character, _ in counts.most_common(MOST_CHARACTERS)))
    return Encoding(dict(fields), values, labels, text, characters, length if text else 0)


def padded(numbers: Sequence[NDArray[np.int64]], length: int) -> NDArray[np.int64]:
    """The first ``length`` numbers of each, with 0 beyond the end of a shorter one."""
    found = np.zeros((len(numbers), length), np.int64)
    for row, given in enumerate(numbers):
        found[row, : len(given)] = given[:length]
    return found


def pieces(numbers: Sequence[NDArray[np.int64]], people: NDArray[Any], length: int) -> tuple[Arrays, NDArray[Any]]:
    """What each person wrote, joined and cut into pieces of ``length``; ``y`` is ``x`` one further on. And the persons.

    What is left over at the end of a person's text is dropped, so that nothing is padded.
    """
    x, y, owners = [], [], []
    for person in np.unique(people):
        whole = np.concatenate([numbers[row] for row in np.flatnonzero(people == person).tolist()])
        count = (len(whole) - 1) // length
        if count > 0:
            x.append(whole[: count * length].reshape(count, length))
            y.append(whole[1 : count * length + 1].reshape(count, length))
            owners.append(np.repeat(person, count))
    if not x:
        raise InputError(f"nobody wrote more than {length} characters or tokens; choose a smaller length")
    return {"x": np.concatenate(x), "y": np.concatenate(y)}, np.concatenate(owners)


def _tokenizer(file: str) -> Any:
    if not Path(file).is_file():
        raise InputError(f"there is no tokenizer '{file}'; give the path of a tokenizer.json, or 'characters'")
    package = extra("tokenizers", "files")
    try:
        return package.Tokenizer.from_file(file)
    except Exception as error:  # the package raises Exception itself
        raise InputError(f"'{file}' is no tokenizer ({str(error).rstrip('.')}); give a tokenizer.json") from error


def _is_text(column: NDArray[Any], or_bool: bool = False) -> bool:
    return column.dtype.kind in "OUST" or (or_bool and column.dtype.kind == "b")


def _refuse_one_hot(column: NDArray[Any], name: str) -> None:
    wide = column.ndim == 2 and column.shape[1] > 1 and column.dtype.kind in "biuf"
    if wide and np.isin(column, (0, 1)).all() and (column.sum(axis=1) == 1).all():
        told = f"the labels '{name}' are one-hot, {column.shape[1]} numbers of which one is 1"
        raise InputError(f"{told}; save the class of each example, which is their argmax")


def _refuse_decimal_commas(column: NDArray[Any], name: str) -> None:
    """Numbers of a file in the writing of many countries are read as words, of which each would be a category."""
    comma = next((str(value) for value in column.tolist() if "," in str(value)), None)
    if comma and all(re.fullmatch(r"[-+]?\d+(,\d+)*", str(value)) for value in column.tolist()):
        raise InputError(
            f"the column '{name}' has numbers with a comma, such as {comma}; write them with a point, or none"
        )


def _known(columns: Sequence[NDArray[Any]]) -> list[Any]:
    found = set().union(*(np.unique(_plain(column)).tolist() for column in columns))
    return sorted(found)


def _plain(column: NDArray[Any]) -> NDArray[Any]:
    return column.astype(np.str_) if column.dtype.kind in "OST" else column


def _positions(column: NDArray[Any], known: Sequence[Any], name: str, whose: str) -> NDArray[np.int64]:
    given = _plain(column)
    values = np.array(known)
    found = np.minimum(np.searchsorted(values, given), len(values) - 1)
    strange = np.flatnonzero(values[found] != given)
    if len(strange):
        told = f"the {whose} have {given[strange[0]]!s} in '{name}' (row {strange[0]}), which no training example has"
        raise InputError(f"{told}; there are {', '.join(str(value) for value in known[:10])}")
    return found.astype(np.int64)


def _one_hot(column: NDArray[Any], known: Sequence[Any]) -> NDArray[np.float32]:
    same: NDArray[np.bool_] = _plain(column)[:, None] == np.array(known)
    return same.astype(np.float32)


def _numbers(name: str, column: NDArray[Any]) -> NDArray[np.float32]:
    _require_numbers(name, column)
    return column.reshape(len(column), -1).astype(np.float32)


def _as_array(name: str, column: NDArray[Any]) -> NDArray[Any]:
    """A column of arrays as it is: bytes of images with channels first, whole numbers (ids), or float32."""
    _require_numbers(name, column)
    if column.dtype == np.uint8 and column.ndim == 3:
        return column[:, None]
    if column.dtype == np.uint8 and column.ndim == 4 and column.shape[-1] in (1, 3) and column.shape[1] not in (1, 3):
        return np.ascontiguousarray(np.moveaxis(column, -1, 1))
    return column if column.dtype.kind in "iu" else column.astype(np.float32)


def _require_numbers(name: str, column: NDArray[Any]) -> None:
    if column.dtype.kind not in "biuf":
        raise InputError(
            f"the column '{name}' has type {column.dtype}, which is neither numbers nor text; leave it out"
        )
