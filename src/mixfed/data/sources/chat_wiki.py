"""Next character: chat of Ubuntu users on clients, Wikipedia articles at the centre."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mixfed.data._arrays import Arrays
from mixfed.data._files import content, reading
from mixfed.data.sources.base import Examples, Source, find
from mixfed.errors import InputError

DESCRIPTION = "next character, 97 classes; chat of 2,500 Ubuntu users, and at the centre 96 Wikipedia articles"
CHAT, WIKI = "text/ubuntu_irc_by_user.csv", "text/wikipedia_excerpt.txt"
OBTAIN = (
    "github.com/jkkummerfeld/irc-disentanglement (chat, as .csv with columns user and text) and any Wikipedia "
    "dump as plain text, each article under a line '= title =' (as in the WikiText files)"
)
BOTS = ("ubotu", "ubottu")

PRINTABLE = "".join(map(chr, range(ord(" "), ord("~") + 1)))
VOCABULARY = ("unknown", "\n", *PRINTABLE)
"""Number 0 is any other character, 1 a new line, 2 to 96 are the printable characters of ASCII in their order."""


def load(folder: Path | None = None, length: int = 100, min_messages: int = 20) -> Source:
    """From ``text/ubuntu_irc_by_user.csv`` and ``text/wikipedia_excerpt.txt``, plain or gzipped.

    An example is ``length`` characters as ``x`` and, one further on, as ``y``. A client's messages are joined by
    new lines and cut into such pieces, so nothing is padded; what is left over at the end is dropped. Users with
    fewer than ``min_messages`` messages or without a whole piece are left out, and so are the channel's bots.
    All is in the training part, of clients and centre: hold out users and articles.
    """
    if length < 1 or min_messages < 1:
        raise InputError(f"length and min_messages must be at least 1, not {length} and {min_messages}")
    chat = _pieces(_chat(find(folder, OBTAIN, CHAT), min_messages), length, "user")
    wiki = _pieces(_articles(find(folder, OBTAIN, WIKI)), length, "article")
    assert chat.people is not None
    return Source(
        train=chat.arrays,
        test=chat.rows(np.empty(0, np.int64)).arrays,
        prepare=None,
        classes=len(VOCABULARY),
        natural_clients={"train": chat.people, "test": chat.people[:0]},
        description=DESCRIPTION,
        licence="chat CC BY 4.0 (Kummerfeld et al., 2019), Wikipedia CC BY-SA",
        names={"y": VOCABULARY},
        centre=wiki,
    )


def encode(text: str) -> NDArray[np.uint8]:
    """The numbers of a text's characters in :data:`VOCABULARY`."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return _TABLE[np.minimum(points, len(_TABLE) - 1)]


_TABLE = np.zeros(128, np.uint8)
_TABLE[[ord(character) for character in VOCABULARY[1:]]] = np.arange(1, len(VOCABULARY))


def _pieces(texts: dict[str, str], length: int, what: str) -> Examples:
    """All whole pieces of the texts; every character but a text's first is predicted at most once."""
    x, y, owners = [], [], []
    for name, text in texts.items():
        numbers = encode(text)
        count = (len(numbers) - 1) // length
        if count > 0:
            x.append(numbers[: count * length].reshape(count, length))
            y.append(numbers[1 : count * length + 1].reshape(count, length))
            owners.append(np.repeat(name, count))
    if not x:
        raise InputError(f"no {what} has more than {length} characters; choose a smaller length or min_messages")
    arrays: Arrays = {"x": np.concatenate(x), "y": np.concatenate(y)}
    return Examples(arrays, np.concatenate(owners))


def _chat(file: Path, min_messages: int) -> dict[str, str]:
    """What each user wrote, message by message in the order of the file."""
    messages: dict[str, list[str]] = {}
    with reading(file):
        rows = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
        header = next(rows, [])
        if not {"user", "text"} <= set(header):
            raise ValueError("its first line must name the columns, among them user and text")
        user, text = header.index("user"), header.index("text")
        for row in rows:
            messages.setdefault(row[user], []).append(row[text])
    return {name: "\n".join(said) for name, said in messages.items() if len(said) >= min_messages and name not in BOTS}


def _articles(file: Path) -> dict[str, str]:
    """Articles by title."""
    with reading(file):
        _, *found = re.split(r"^ ?= ([^=].*) = ?$", _text(file), flags=re.MULTILINE)
        if not found:
            raise ValueError("every article must start with a line '= title ='")
    return {title: text.strip() for title, text in zip(found[::2], found[1::2], strict=True)}


def _text(file: Path) -> str:
    return content(file).decode("utf-8")
