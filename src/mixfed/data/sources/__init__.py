"""Known datasets, by name. To add one: a module with ``load``, and a line in :data:`SOURCES`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from mixfed.data.sources import (
    adult,
    celeba,
    chat_style,
    chat_wiki,
    cifar10,
    cifar100,
    digits,
    faces,
    fashion_mnist,
    files,
    mnist,
    movielens,
    vqa,
)
from mixfed.data.sources.base import Examples, Source, SourceInfo
from mixfed.errors import InputError

__all__ = ["SOURCES", "Examples", "Source", "SourceInfo", "load_source"]

SOURCES: dict[str, SourceInfo] = {
    "adult": SourceInfo(adult.load, adult.DESCRIPTION, adult.OBTAIN),
    "celeba": SourceInfo(celeba.load, celeba.DESCRIPTION, celeba.OBTAIN),
    "chat-style": SourceInfo(chat_style.load, chat_style.DESCRIPTION, chat_style.OBTAIN),
    "chat-wiki": SourceInfo(chat_wiki.load, chat_wiki.DESCRIPTION, chat_wiki.OBTAIN),
    "cifar10": SourceInfo(cifar10.load, cifar10.DESCRIPTION, cifar10.OBTAIN),
    "cifar100": SourceInfo(cifar100.load, cifar100.DESCRIPTION, cifar100.OBTAIN),
    "digits": SourceInfo(digits.load, digits.DESCRIPTION, digits.OBTAIN),
    "faces": SourceInfo(faces.load, faces.DESCRIPTION, faces.OBTAIN),
    "fashion-mnist": SourceInfo(fashion_mnist.load, fashion_mnist.DESCRIPTION, fashion_mnist.OBTAIN),
    "files": SourceInfo(files.load, files.DESCRIPTION, files.OBTAIN),
    "mnist": SourceInfo(mnist.load, mnist.DESCRIPTION, mnist.OBTAIN),
    "movielens": SourceInfo(movielens.load, movielens.DESCRIPTION, movielens.OBTAIN),
    "movielens-100k": SourceInfo(movielens.load_100k, movielens.DESCRIPTION_100K, movielens.OBTAIN),
    "vqa": SourceInfo(vqa.load, vqa.DESCRIPTION, vqa.OBTAIN),
}


def load_source(name: str, folder: str | Path | None = None, **options: Any) -> Source:
    """A known dataset from its files in ``folder``, or in the folder that MIXFED_DATA names.

    Some sources have ``options``, which are the further parameters of their ``load``.
    """
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1, cutoff=0.0)[0]
        raise InputError(f"there is no source '{name}'; did you mean '{near}' (all: {', '.join(SOURCES)})?")
    return SOURCES[name].load(None if folder is None else Path(folder), **options)
