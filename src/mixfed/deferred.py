"""Functions that are known by their place before their module is imported.

The registries of networks, optimizers and algorithms hold such functions, because their modules need PyTorch, which
takes longer to load than a recipe takes to be read, checked and refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Deferred(Generic[T_co]):
    """The function (or class) ``name`` of ``module``, imported when it is called."""

    module: str
    name: str

    def load(self) -> Any:
        """The function itself."""
        return getattr(import_module(self.module), self.name)

    def __call__(self, *positional: Any, **named: Any) -> T_co:
        made: T_co = self.load()(*positional, **named)
        return made
