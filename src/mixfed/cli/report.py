"""``mixfed report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mixfed.cli.common import reported
from mixfed.cli.console import stdout
from mixfed.experiments.reporting import report


def execute(folders: Sequence[Path], out: Path | None) -> None:
    """Writes the report, and says where."""
    with reported():
        stdout.print(f"Report: {report(folders, out)}", soft_wrap=True)
