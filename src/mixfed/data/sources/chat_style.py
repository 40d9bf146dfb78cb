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

DESCRIPTION = "a chat user's message without its end: was it a full stop, question mark, exclamation mark or smiley?"
OBTAIN = "github.com/jkkummerfeld/irc-disentanglement, as .csv with columns user and text"
ENDINGS = ("full stop", "question mark", "exclamation mark", "smiley")


def load(folder: Path | None = None, length: int = 60, min_messages: int = 20, users: int = 0) -> Source:
    """From ``text/ubuntu_irc_by_user.csv``, plain or gzipped.

    ``x`` is a message without its ending, its last ``length`` characters (0 beyond the end of a shorter one), ``y`` the
    ending; messages that end without a mark are left out. Users with fewer than ``min_messages`` of the others are left
    out too, and with ``users`` only the most talkative are kept. A random tenth of the messages is the test part.
    """
    if length < 1 or min_messages < 1 or users < 0:
        raise InputError("length and min_messages must be at least 1 and users not negative")
    said = {
        name: [(text, ending) for text, ending in map(without_ending, messages.split("\n")) if text and ending]
        for name, messages in _chat(find(folder, OBTAIN, CHAT), min_messages).items()
    }
    known = [name for name in said if len(said[name]) >= min_messages]
    talkative = sorted(known, key=lambda name: (-len(said[name]), name))[: users or None]
    if not talkative:
        raise InputError(f"no user wrote {min_messages} messages with a mark at the end; choose a smaller min_messages")
    people = np.repeat(talkative, [len(said[name]) for name in talkative])
    x, y = np.zeros((len(people), length), np.uint8), np.zeros(len(people), np.int64)
    for row, (text, ending) in enumerate(pair for name in talkative for pair in said[name]):
        numbers = encode(text[-length:])
        x[row, : len(numbers)], y[row] = numbers, ENDINGS.index(ending)
    arrays: Arrays = {"x": x, "y": y}
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


def without_ending(message: str) -> tuple[str, str]:
    """What the message says before its ending, and which of :data:`ENDINGS` that is (or ""); of several the last."""
    message = message.rstrip()
    smiley = re.search(r"(^|\s)[:;=]['-]?[()DPp/|]+$", message)
    if smiley:
        return message[: smiley.start()].rstrip(" .?!"), "smiley"
    text = message.rstrip(" .?!")
    return text, dict(zip(".?!", ENDINGS, strict=False))[message[-1]] if len(text) < len(message) else ""
