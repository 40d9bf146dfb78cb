"""What was timed on this machine before."""

from __future__ import annotations

import os
from pathlib import Path


class Remembered:
    """Which executor was the fastest for a piece of work, in a small file of the user's cache folder."""

    def __init__(self, signature: str) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.file = Path(base) / "mixfed" / "executors" / signature

    def load(self) -> str | None:
        try:
            return self.file.read_text().strip()
        except OSError:
            return None

    def save(self, name: str) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(name + "\n")
        except OSError:
            return  # a machine without a writable home times again next time
