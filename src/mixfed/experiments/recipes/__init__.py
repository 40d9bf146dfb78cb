"""The recipes that come with the package, one TOML file each."""

from __future__ import annotations

from importlib import resources


def packaged() -> dict[str, str]:
    """The text of every packaged recipe by name."""
    files = [f for f in resources.files(__name__).iterdir() if f.name.endswith(".toml")]
    return {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in sorted(files, key=lambda f: f.name)}
