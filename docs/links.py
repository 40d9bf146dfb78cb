"""A hook of the site: links that leave the pages (to code, or to the README) become plain words there."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?!docs)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The text of a page as the site shows it."""
    return _OUTSIDE.sub(r"\1", markdown)
