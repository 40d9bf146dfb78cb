"""What the commands do, for Python: compare, train, tune and probe a task of one's own or a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from mixfed.core.algorithm import Algorithm
from mixfed.core.loop import Record, Result
from mixfed.errors import InputError, explained, from_extra
from mixfed.evaluate.metrics import Metric, measure, name_of, require_metrics
from mixfed.evaluate.probe.advice import Advice
from mixfed.experiments import probing
from mixfed.experiments import tune as tuning
from mixfed.experiments.advise import advice as advising
from mixfed.experiments.build import build
from mixfed.experiments.compare import compare as compare_recipes
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.objects import name_shown, of_arrays, plain
from mixfed.experiments.report.bars import bars, begun_on
from mixfed.experiments.report.files import folder_for
from mixfed.experiments.report.tables import amount, mean_and_spread
from mixfed.experiments.request import Request
from mixfed.experiments.running import run_in_folder
from mixfed.experiments.watch import Watch

Made = Callable[..., Algorithm]
"""A function of the user's own that makes an algorithm, of the clients' trainer or of the whole setup."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found: ``algorithms`` has metrics and costs by method, as comparison.json does."""

    algorithms: Mapping[str, Any]
    folder: Path
    found: Mapping[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """One flat row for each method, for tables and frames."""
        return [
            {"method": name}
            | {metric: figures["mean"] for metric, figures in entry["metrics"].items()}
            | {f"{metric}_spread": figures["spread"] for metric, figures in entry["metrics"].items()}
            | entry["ledger"]
            for name, entry in self.algorithms.items()
        ]

    def frame(self) -> Any:
        """The comparison as a pandas frame, a row for each method."""
        return from_extra("pandas", "pandas", "A frame").DataFrame(self.rows()).set_index("method")

    def best(self, metric: str = "accuracy") -> str:
        """The method with the highest mean of the metric (the lowest, of a loss)."""
        from mixfed.experiments.scores import small_is_good

        means = {name: entry["metrics"].get(metric, {}).get("mean") for name, entry in self.algorithms.items()}
        known = {name: mean for name, mean in means.items() if mean is not None}
        if not known:
            raise InputError(f"No method of the comparison has a number for '{metric}'.")
        return (min if small_is_good(metric) else max)(known, key=lambda name: known[name])

    def _cells(self) -> list[list[str]]:
        metrics = list(dict.fromkeys(m for entry in self.algorithms.values() for m in entry["metrics"]))
        rows = [["method", *metrics, "bytes"]]
        for name, entry in self.algorithms.items():
            sent = entry["ledger"]["bytes_down"] + entry["ledger"]["bytes_up"]
            figures = [mean_and_spread(entry["metrics"].get(metric)) for metric in metrics]
            rows.append([name, *figures, amount("bytes", sent)])
        return rows

    def __repr__(self) -> str:
        cells = self._cells()
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)

    def _repr_html_(self) -> str:
        head, *rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._cells()]
        return f"<table><thead><tr>{head}</tr></thead>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def compare(
    task: Request | str,
    algorithms: Sequence[str | Made],
    *,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    resume: bool = False,
    probe: bool = False,
    progress: bool = True,
) -> Comparison:
    """Trains every algorithm with every seed on one footing, in a folder (``runs/NAME-compare`` by default).

    ``task`` is a :class:`mixfed.Task`, or a recipe by its name or path. An algorithm is a name, or a function of your
    own that makes one of a trainer. The folder has ``report.html`` in the end.
    """
    recipes = _request(task).recipes(_listed(algorithms), _seeds(seeds))
    folder = folder_for(_path(out), f"{recipes[0].name}-compare")
    with _watching(progress) as watch:
        found = compare_recipes(recipes, folder, resume=resume, probe=probe, watch=watch)
    return Comparison(found["algorithms"], folder, found)


def train(
    task: Request | str,
    algorithm: str | Made | None = None,
    *,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Result:
    """Trains one algorithm, with a run folder if ``out`` names one; ``resume`` goes on with the run in it.

    ``settings`` are keys of a recipe that differ from the task's, as an advice names them.
    """
    request = _request(task)
    if resume and out is None:
        raise InputError("A run is resumed in its folder; name that with out.")
    chosen = {} if algorithm is None else {"algorithm": _algorithm(algorithm)}
    recipe = request.on(request.base(), seed=plain(seed), **chosen, **plain(settings or {}))
    experiment = build(recipe)
    with _watching(progress) as watch:
        moved = watch.begin(f"{recipe.algorithm} · seed {seed}", recipe.rounds)

        def tell(record: Record) -> None:
            moved(record.round, record.metrics)

        if out is None:
            return experiment.run(callbacks=[tell], should_stop=watch.should_stop)
        folder = RunFolder(out)
        begun = resume and folder.config.exists()
        if begun:
            folder.adopt(recipe)
        return run_in_folder(experiment, folder, resume=begun, callbacks=[tell], should_stop=watch.should_stop)


def tune(
    task: Request | str,
    algorithms: Sequence[str | Made],
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    trials: int | None = None,
    on: str = "validation",
    metric: str | Metric | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Tries equally many points of the grid for every algorithm, never on test data; what tuning.json holds.

    ``grid`` has values for keys of the recipe (``{"client.learning_rate": [0.03, 0.1]}``), or for one algorithm only
    (``{"fedprox:algorithms.fedprox.mu": [0.01, 0.1]}``).
    """
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InputError(f"A grid has a list of values for each key, and '{key}' has {values!r}.")
    request, names = _request(task), _listed(algorithms)
    given = [f"{key}={','.join(_as_toml(value) for value in values)}" for key, values in grid.items()]
    with _watching(progress) as watch:
        found, _ = tuning.tune(
            request, names, given, _seeds(seeds), out, trials=trials, on=on, metric=_metric(metric), watch=watch
        )
    return found


def probe(task: Request | str, *, rounds: int = 100, repeats: int = 5, progress: bool = True) -> Advice:
    """Is Parallel Training enough? Measures how unlike clients and centre are, and what follows from it."""
    request = _request(task)
    with _watching(progress) as watch:
        _, advice = probing.probe(request.on(request.base()), rounds, repeats, watch)
    return advice


def advise(
    task: Request | str, *, minutes: float = 5, metric: str | Metric | None = None, progress: bool = True
) -> advising.Advice:
    """Which method should I use? Looks at who holds what, tries methods on validation data for so long, and says why.

    ``task`` is a :class:`mixfed.Task`, or a recipe by its name or path.
    """
    if isinstance(minutes, bool) or not isinstance(minutes, int | float):
        raise InputError(f"The minutes of an advice are a number, not {minutes!r}.")
    with _watching(progress):
        return advising.advise(_request(task), minutes, _metric(metric))


def score(result: Result, data: Any, metrics: Sequence[str | Metric] = ("loss", "accuracy")) -> dict[str, float]:
    """The metrics of a trained model on data: central data, or a mapping of arrays."""
    if not isinstance(result, Result):
        raise InputError(f"What is scored is the Result of a run, not a {type(result).__name__}.")
    require_metrics(metrics)
    if result.model is None:
        raise InputError("This result does not know its model, so it cannot be evaluated.")
    with explained("The examples cannot be scored", "; give them the fields of the training examples"):
        return measure(result.model, result.params, of_arrays(data, "given"), metrics)


def _listed(algorithms: Sequence[str | Made]) -> list[str]:
    if isinstance(algorithms, str):
        raise InputError(f"The algorithms are a list, such as ['{algorithms}'], and not a text.")
    if not isinstance(algorithms, Iterable) or not algorithms:
        raise InputError(f"The algorithms are a list with at least one name, such as ['fedavg'], not {algorithms!r}.")
    return [_algorithm(algorithm) for algorithm in algorithms]


def _algorithm(given: str | Made) -> str:
    """The name of an algorithm, also of one that a function of the user's own makes."""
    if isinstance(given, str):
        return given
    if getattr(given, "__module__", "").startswith("mixfed."):
        raise InputError("Packaged algorithms are asked for by their names, such as 'fedavg'; see mixfed.ALGORITHMS.")
    return name_shown("algorithm", given)


def _metric(given: str | Metric | None) -> str | None:
    return None if given is None else name_of(given)


def _seeds(seeds: Sequence[int]) -> list[int]:
    if isinstance(seeds, str) or not isinstance(seeds, Iterable) or not list(seeds):
        raise InputError(f"The seeds are a list with at least one, such as [0, 1], not {seeds!r}.")
    return [plain(seed) for seed in seeds]


def _request(task: Request | str) -> Request:
    if isinstance(task, Request):
        return task
    if not isinstance(task, str | Path):
        raise InputError(f"A task is a mixfed.Task or the name of a recipe, not a {type(task).__name__}.")
    return Request(str(task))


def _path(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out)


def _as_toml(value: Any) -> str:
    value = plain(value)
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


@contextmanager
def _watching(progress: bool) -> Iterator[Watch]:
    """Bars in a terminal or a notebook, unless they are not wanted."""
    if not progress:
        yield Watch()
        return
    with bars() as bar:
        yield Watch(partial(begun_on, bar))
