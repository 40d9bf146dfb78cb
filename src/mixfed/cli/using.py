"""``mixfed export``."""

from __future__ import annotations

from pathlib import Path

from mixfed.cli.common import reported
from mixfed.cli.console import stdout


def export_model(run: Path, to: str, out: Path | None) -> None:
    """Writes the model, and says where."""
    from mixfed.experiments.using import export

    with reported():
        stdout.print(f"Model: {export(run, to, out)}", soft_wrap=True)
