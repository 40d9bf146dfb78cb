"""``mixfed new``."""

from __future__ import annotations

from mixfed.cli.common import words
from mixfed.cli.console import stdout
from mixfed.cli.ownership import holdings_table
from mixfed.experiments.new import new_recipe


def execute(
    name: str,
    clients: str,
    central: str | None,
    test: str | None,
    client: str | None,
    label: str | None,
    features: str | None,
) -> None:
    """Writes a recipe for files, and says who holds what and how to go on."""
    chosen = words(features, "--features") if features else ()
    file, recipe, scenario = new_recipe(name, clients, central, test, client, label, chosen)
    stdout.print(holdings_table(recipe.name, scenario))
    fields = recipe.data.options["fields"]
    stdout.print(
        f"Learns: {fields['y']} from {_told(fields['x'])} (--label and --features say otherwise)",
        markup=False,
        soft_wrap=True,
    )
    methods = "fedavg,gradient_2way,parallel" if scenario.central is not None else "fedavg,fedprox,fedadam"
    stdout.print(f"Recipe: {file}", soft_wrap=True)
    stdout.print(f"Train:   mixfed run {file}\nCompare: mixfed compare {file} --algorithms {methods}", soft_wrap=True)


def _told(columns: str | list[str]) -> str:
    """The columns, or the first few of many."""
    listed = [columns] if isinstance(columns, str) else columns
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
