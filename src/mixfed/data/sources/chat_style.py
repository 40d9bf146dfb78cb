"""Personal style in chat: how long will this user's next message be? In place of the paper's unpublished mood data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mixfed.data._arrays import Arrays, take
from mixfed.data.sources.base import Source, find
from mixfed.data.sources.chat_wiki import CHAT, _chat, encode
from mixfed.errors import InputError
from mixfed.rng import generator

DESCRIPTION = "a chat user's message, and in which of 5 bins the length of the user's next one is; 2,500 Ubuntu users"
OBTAIN = "github.com/jkkummerfeld/irc-disentanglement, as .csv with columns user and text"


def load(folder: Path | None = None, length: int = 60, min_messages: int = 40, users: int = 0) -> Source:
    """From ``text/ubuntu_irc_by_user.csv``, plain or gzipped.

    ``x`` is a message of at most ``length`` characters (0 beyond its end), ``y`` the bin of the next message's length;
    the bins hold a fifth of all messages each. Users with fewer than ``min_messages`` messages are left out, and with
    ``users`` only the most talkative are kept. A random tenth of the pairs is the test part.
    """
    if length < 1 or min_messages < 2 or users < 0:
        raise InputError("length must be at least 1, min_messages at least 2 and users not negative")
    said = {name: text.split("\n") for name, text in _chat(find(folder, OBTAIN, CHAT), min_messages).items()}
    talkative = sorted(said, key=lambda name: (-len(said[name]), name))[: users or None]
    if not talkative:
        raise InputError(f"no user wrote {min_messages} messages; choose a smaller min_messages")
    x, lengths, owners = [], [], []
    for name in talkative:
        for message, following in zip(said[name], said[name][1:], strict=False):
            numbers = encode(message[:length])
            x.append(np.pad(numbers, (0, length - len(numbers))))
            lengths.append(len(following))
            owners.append(name)
    edges = np.quantile(lengths, [0.2, 0.4, 0.6, 0.8])
    arrays: Arrays = {"x": np.stack(x), "y": np.searchsorted(edges, lengths).astype(np.int64)}
    people = np.array(owners)
    test = generator(0, "sources/chat-style").random(len(people)) < 0.1
    parts = {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}
    return Source(
        train=take(arrays, parts["train"]),
        test=take(arrays, parts["test"]),
        prepare=None,
        classes=5,
        natural_clients={name: people[rows] for name, rows in parts.items()},
        description=DESCRIPTION,
        licence="CC BY 4.0 (Kummerfeld et al., 2019)",
        names={"y": ("very short", "short", "middling", "long", "very long")},
    )
