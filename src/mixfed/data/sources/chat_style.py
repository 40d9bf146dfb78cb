"""Personal style in chat: how does this user end this message? In place of the paper's unpublished mood data."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from mixfed.data._arrays import Arrays, take
from mixfed.data.sources.base import Source, find
from mixfed.data.sources.chat_wiki import CHAT, _chat, encode
from mixfed.errors import InputError
from mixfed.rng import generator

DESCRIPTION = "a chat user's message without its end: nothing, full stop, question mark, exclamation mark or smiley?"
OBTAIN = "github.com/jkkummerfeld/irc-disentanglement, as .csv with columns user and text"
ENDINGS = ("nothing", "full stop", "question mark", "exclamation mark", "smiley")


def load(folder: Path | None = None, length: int = 60, min_messages: int = 40, users: int = 0) -> Source:
    """From ``text/ubuntu_irc_by_user.csv``, plain or gzipped.

    ``x`` is a message without its ending, its last ``length`` characters (0 beyond the end of a shorter one), ``y`` the
    ending. Users with fewer than ``min_messages`` messages are left out, and with ``users`` only the most talkative are
    kept. A random tenth of the messages is the test part.
    """
    if length < 1 or min_messages < 1 or users < 0:
        raise InputError("length and min_messages must be at least 1 and users not negative")
    said = {name: text.split("\n") for name, text in _chat(find(folder, OBTAIN, CHAT), min_messages).items()}
    talkative = sorted(said, key=lambda name: (-len(said[name]), name))[: users or None]
    if not talkative:
        raise InputError(f"no user wrote {min_messages} messages; choose a smaller min_messages")
    cut = [(name, *without_ending(message)) for name in talkative for message in said[name]]
    cut = [(name, text, ending) for name, text, ending in cut if text]
    x = np.zeros((len(cut), length), np.uint8)
    for row, (_, text, _) in zip(x, cut, strict=True):
        numbers = encode(text[-length:])
        row[: len(numbers)] = numbers
    arrays: Arrays = {"x": x, "y": np.array([ending for _, _, ending in cut], np.int64)}
    people = np.array([name for name, _, _ in cut])
    test = generator(0, "sources/chat-style").random(len(people)) < 0.1
    parts = {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}
    return Source(
        train=take(arrays, parts["train"]),
        test=take(arrays, parts["test"]),
        prepare=None,
        classes=len(ENDINGS),
        natural_clients={name: people[rows] for name, rows in parts.items()},
        description=DESCRIPTION,
        licence="CC BY 4.0 (Kummerfeld et al., 2019)",
        names={"y": ENDINGS},
    )


def without_ending(message: str) -> tuple[str, int]:
    """What the message says before its ending, and which of :data:`ENDINGS` that is; of several marks the last."""
    message = message.rstrip()
    smiley = re.search(r"(^|\s)[:;=]['-]?[()DPp/|]+$", message)
    if smiley:
        return message[: smiley.start()].rstrip(" .?!"), 4
    text = message.rstrip(" .?!")
    return text, 1 + ".?!".index(message[-1]) if len(text) < len(message) else 0
