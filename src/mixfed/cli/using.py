"""``mixfed predict`` and ``mixfed export``."""

from __future__ import annotations

from pathlib import Path

from mixfed.cli.common import reported
from mixfed.cli.console import stdout


def export_model(run: Path, to: str, out: Path | None) -> None:
    """Writes the model, and says where."""
    from mixfed.experiments.using import export

    with reported():
        stdout.print(f"Model: {export(run, to, out)}", soft_wrap=True)


def answer_file(run: Path, data: Path, out: Path | None, client: int | None) -> None:
    """Writes the answers, and says where."""
    from mixfed.experiments.answering import predict_file

    with reported():
        stdout.print(f"Answers: {predict_file(run, data, out, client=client)}", soft_wrap=True)
