"""Settings of an experiment's methods, chosen by ``mixfed tune`` with the same number of trials for each."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from mixfed.experiments.reproduce.definition import Definition, Method, slug
from mixfed.experiments.reproduce.plan import Asked, fingerprint, tuning_request, what_is_said
from mixfed.experiments.reproduce.store import Record, Stored
from mixfed.experiments.texts import setting
from mixfed.experiments.tune import tune
from mixfed.experiments.watch import UNWATCHED, Watch


def fingerprint_of(definition: Definition, method: Method) -> str:
    """A fingerprint of what is tried for a method, and how."""
    how = definition.tune
    assert how is not None
    request = tuning_request(definition, method)
    written = what_is_said(request.written(request.base(), algorithm=method.algorithm))
    tried = {"grid": method.grid, "trials": how.trials, "seeds": how.seeds, "on": how.on, "last": how.last}
    return fingerprint({"written": written, "metric": definition.metric, **tried})


def is_stored(definition: Definition, method: Method, stored: Stored) -> bool:
    """Whether what is to be tried for this method was tried."""
    record = stored.tuning.get(method.label)
    return record is not None and record["fingerprint"] == fingerprint_of(definition, method)


def waits(definition: Definition, method: Method, stored: Stored) -> bool:
    """Whether the method cannot run before its settings are chosen."""
    return bool(method.grid) and not is_stored(definition, method, stored)


def choose(definition: Definition, method: Method, asked: Asked, out: Path, watch: Watch = UNWATCHED) -> Record:
    """Tries the points of a method's grid: what is stored of it."""
    how = definition.tune
    assert how is not None
    request = tuning_request(definition, method, asked)
    mark = fingerprint_of(definition, method)
    began = time.perf_counter()
    found, _ = tune(
        request,
        [method.algorithm],
        {method.algorithm: method.grid},
        how.seeds,
        out / f"tune-{slug(method.label)}-{mark[:6]}",
        trials=how.trials,
        on=how.on,
        metric=definition.metric,
        last=how.last,
        watch=watch,
    )
    entry = found["algorithms"][method.algorithm]
    return {
        **{"label": method.label, "command": command(definition, method), "fingerprint": mark},
        **{"on": how.on, "metric": definition.metric, "rounds": found["rounds"], "seeds": how.seeds},
        "grid": entry["grid"],
        "trials": [{"settings": trial["settings"], "scores": trial["values"]} for trial in entry["trials"]],
        "chosen": entry["best"]["settings"] if entry["best"] else {},
        "at_edge": entry["at_edge"],
        "seconds": round(time.perf_counter() - began, 1),
    }


def command(definition: Definition, method: Method) -> str:
    """The command that tries the same points without the experiment."""
    how = definition.tune
    assert how is not None
    request = tuning_request(definition, method)
    words = ["mixfed", "tune", request.recipe, "--algorithms", method.algorithm]
    for key, values in method.grid.items():
        words += ["--grid", f"{key}={','.join(_text(value) for value in values)}"]
    words += ["--trials", str(how.trials), "--metric", definition.metric, "--last", str(how.last), "--on", how.on]
    words += ["--seeds", ",".join(map(str, how.seeds))]
    words += ["--rounds", str(request.options["rounds"])] if "rounds" in request.options else []
    return shlex.join([*words, *(word for text in request.settings for word in ("--set", text))])


def _text(value: Any) -> str:
    return setting("", value).removeprefix("=")
