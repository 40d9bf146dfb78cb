"""Pages whose tables, figures and numbers come from stored results.

Prose stays by hand. What is between two comments is written by ``mixfed reproduce --pages``::

    <!-- table smile methods: loss; accuracy; auc as AUC; ledger.bytes_up as up -->
    …
    <!-- end -->

    and FedAvg reaches <!-- n smile | FedAvg | auc -->0.561 ± 0.006<!-- /n -->, no more than chance.

A block has the comment's first word as its kind (:data:`BLOCKS`); a number in prose names the experiment, a label (or a
difference of two) and a metric. A comment of a number must not begin a line, where it would end the paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from mixfed.core.files import write_atomically
from mixfed.errors import InputError
from mixfed.experiments.reproduce import blocks, figures
from mixfed.experiments.reproduce.blocks import Found
from mixfed.experiments.reproduce.definition import Definition, load
from mixfed.experiments.reproduce.store import Store, Stored

_BLOCK = re.compile(r"^<!-- ([a-z]+)(?: ([^\n]*?))? -->\n(.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"<!-- n ([^\n]*?) -->(.*?)<!-- /n -->", re.DOTALL)
_FENCED = re.compile(r"(^```.*?^```[ \t]*$)", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"^ *\|[ :-]*-[-| :]*\|$", re.MULTILINE)

Block = Callable[[str, Found], str]
BLOCKS: dict[str, Block] = {
    "table": blocks.table,
    "claims": blocks.claims,
    "winners": blocks.winners,
    "tuning": blocks.tuning,
    "summary": blocks.summary,
    "experiments": blocks.experiments,
    "needed": blocks.needed,
    "figure": figures.markdown,
}


def finder(store: Store) -> Found:
    """What finds an experiment and what is stored of it; each is read once."""

    @cache
    def find(name: str) -> tuple[Definition, Stored]:
        definition = load(name)
        return definition, store.read(name)

    return find


def rendered(text: str, find: Found, page: str) -> str:
    """The page with everything between comments written anew, but for what is shown as code."""

    def block(match: re.Match[str]) -> str:
        kind, arguments = match[1], match[2] or ""
        if kind not in BLOCKS:
            raise InputError(f"{page}: a block is one of {', '.join(BLOCKS)}, not '{kind}'.")
        inner = _told(page, match, lambda: BLOCKS[kind](arguments, find))
        head = f"<!-- {kind}{f' {arguments}' if arguments else ''} -->"
        return f"{head}\n\n{inner.strip()}\n\n<!-- end -->"

    def number(match: re.Match[str]) -> str:
        if match.start() == 0 or match.string[match.start() - 1] == "\n":
            raise InputError(f"{page}: the comment of a number ({match[1]}) begins a line; put a word before it.")
        return f"<!-- n {match[1]} -->{_told(page, match, lambda: blocks.quoted(match[1], find))}<!-- /n -->"

    pieces = _FENCED.split(text)
    pieces[::2] = [_NUMBER.sub(number, _BLOCK.sub(block, piece)) for piece in pieces[::2]]
    return "".join(pieces)


def _told(page: str, match: re.Match[str], make: Callable[[], str]) -> str:
    try:
        return make()
    except InputError as error:
        raise InputError(f"{page}, '{match[0].partition('-->')[0]}-->': {error}") from error


def rewrite(store: Store, folder: Path) -> list[Path]:
    """Writes all pages and figures of a folder anew; those that changed."""
    find, changed = finder(store), []
    for page in pages_in(folder):
        text = page.read_text(encoding="utf-8")
        new = rendered(text, find, page.name)
        changed += [folder / name for name in figures.draw(arguments_of(text, "figure"), find, folder)]
        if new != text:
            write_atomically(page, new.encode())
            changed.append(page)
    return changed


def pages_in(folder: Path) -> list[Path]:
    """The pages of a folder that have something to be written."""
    return [page for page in sorted(folder.glob("*.md")) if "<!-- " in page.read_text(encoding="utf-8")]


def arguments_of(text: str, kind: str) -> list[str]:
    """What the blocks of one kind say."""
    return [match[2] or "" for match in _BLOCK.finditer(_FENCED.sub("", text)) if match[1] == kind]


def tables_by_hand(text: str) -> int:
    """How many tables of a page are not written from stored results."""
    return len(_TABLE.findall(_BLOCK.sub("", _FENCED.sub("", text))))
