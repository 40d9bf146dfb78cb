"""What clients keep on their devices, in simulation: only the clients that have been seen take memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mixfed.core import Private


class PrivateStore:
    """Private parts by (source, client); a client that was never seen has the initial one."""

    def __init__(self, initial: Callable[[], Private]) -> None:
        self._initial = initial
        self._seen: dict[str, dict[int, Private]] = {}

    def get(self, source: str, client: int) -> Private:
        """The client's private part."""
        seen = self._seen.get(source, {})
        return seen[client] if client in seen else self._initial()

    def put(self, source: str, client: int, private: Private) -> None:
        """Keeps the client's private part; an empty one takes no memory."""
        if private:
            self._seen.setdefault(source, {})[client] = private

    def items(self, source: str) -> Iterator[tuple[int, Private]]:
        """Every client seen so far, in order."""
        yield from sorted(self._seen.get(source, {}).items())

    def tree(self) -> dict[str, Any]:
        """All private parts as one tree, for the checkpoint."""
        return {source: {str(c): p for c, p in sorted(seen.items())} for source, seen in self._seen.items()}

    def restore(self, tree: dict[str, Any]) -> None:
        """Takes up the private parts of a checkpoint."""
        self._seen = {source: {int(c): p for c, p in seen.items()} for source, seen in tree.items()}
