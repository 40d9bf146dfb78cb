"""``mixfed advise``: which method should I use?"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from rich.table import Table

from mixfed.cli.common import progress
from mixfed.cli.console import stderr, stdout
from mixfed.experiments.advise.advice import Advice, advise
from mixfed.experiments.report.files import folder_for, write_json
from mixfed.experiments.report.tables import amount, figure
from mixfed.experiments.request import Request


def execute(request: Request, minutes: float, metric: str | None, out: Path | None, *, to_json: bool) -> None:
    """Looks, tries, and prints what to use and why."""
    out = folder_for(out, f"{request.on(request.base()).name}-advice")
    with progress():
        found = advise(request, minutes, metric, lambda text: stderr.print(f"Trying {text} …", style="dim"))
    write_json(out / "advice.json", found.json() | found.behind())
    stdout.print("\n".join(found.look), soft_wrap=True)
    stdout.print(_table(found))
    if found.warning:
        stdout.print(found.warning, soft_wrap=True, style="yellow")
    for number, entry in enumerate(found.advice):
        stdout.print(f"{number + 1}. {entry['why']}", soft_wrap=True)
    stdout.print("Ruled out:")
    for name, why in found.ruled_out.items():
        stdout.print(f"- {name}: {why}.", soft_wrap=True)
    stdout.print(found.time, soft_wrap=True)
    stdout.print(f"To follow it: {_command(request, found.advice[0])}\nAdvice: {out / 'advice.json'}", soft_wrap=True)
    if to_json:
        print(json.dumps(found.json()))


def _table(found: Advice) -> Table:
    table = Table(title="what was tried, on validation data", title_justify="left")
    for heading in ("algorithm", "settings", "rounds", found.metric, "seeds", "sent", "seconds"):
        table.add_column(heading, justify="left" if heading in ("algorithm", "settings") else "right")
    for row in found.trials:
        settings = "\n".join(f"{key} = {value:g}" for key, value in row["settings"].items())
        shown = (figure(row[found.metric]), str(row["seeds"]), amount("bytes", row["bytes"]), f"{row['seconds']:.1f}")
        table.add_row(row["algorithm"], settings, str(row["rounds"]), *shown)
    return table


def _command(request: Request, entry: dict[str, Any]) -> str:
    """The run that was advised, with all that the user had said for the trials."""
    flags = {"rounds": "--rounds", "data.folder": "--data"}
    options = [(flags.get(key, "--set"), key, value) for key, value in request.options.items()]
    words = ["mixfed", "run", request.recipe, "--algorithm", entry["algorithm"]]
    words += [
        word for flag, key, value in options for word in (flag, f"{key}={value}" if flag == "--set" else f"{value}")
    ]
    own = [f"{key}={value}" for key, value in entry["settings"].items()]
    return shlex.join([*words, *(word for text in [*request.settings, *own] for word in ("--set", text))])
