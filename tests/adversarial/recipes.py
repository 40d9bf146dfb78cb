"""Malformed recipes: wrong types, unknown keys, extreme numbers, markup, nesting, missing sections, torn text."""

from __future__ import annotations

import json
import math
from typing import Any

from mixfed.algorithms.registry import ALGORITHMS
from mixfed.experiments import toml
from tests.adversarial.trial import Trial, judged, must_refuse

TINY = [
    "rounds=2", "cohort=2", "data.partition.clients=6", "client.steps=1", "client.epochs=0", "central.steps=1",
    "evaluate.every=1", "simulator.executor=loop", "simulator.threads=1",
]  # fmt: skip

NASTY: list[Any] = [
    True, False, -1, 0, 1, 2, 10**12, -(10**12), 2**63, 10**400, 0.5, -0.5, 1e308, -1e308, 5e-324, math.nan, math.inf,
    -math.inf, "", "word", "[bold]x[/bold]", "[/]", "[/nosuch]", "\x00", "\u202e\U0001f4a5é", "a" * 1000, "../../x",
    "/dev/full", "%s{0}$HOME", "0x10", [], [[]], [1, "a"], [math.nan], [-1], [0], [10**12], ["[/]"], {}, {"x": 1},
    {"[/]": {"": 0}},
]  # fmt: skip

NONSENSE: list[list[str]] = [
    ["rounds=0"], ["rounds=-1"], ["cohort=0"], ["cohort=-3"], ["cohort=7"],
    ["client.learning_rate=-1.0"], ["client.learning_rate=nan"], ["client.learning_rate=inf"],
    ["server.learning_rate=nan"], ["client.momentum=5.0"], ["client.momentum=-0.1"], ["client.momentum=nan"],
    ["client.decay=-1.0"], ["client.decay=nan"], ["client.weight_decay=-5.0"], ["client.weight_decay=nan"],
    ["client.optimizer=adam", "client.betas=[2.0, 3.0]"], ["client.optimizer=adam", "client.betas=[0.9]"],
    ["client.optimizer=adam", "client.epsilon=-1.0"], ["client.optimizer=yogi", "client.epsilon=nan"],
    ["client.batch_size=-1"], ["client.steps=-1"], ["client.epochs=-1", "client.steps=0"], ["client.clip=-1.0"],
    ["client.clip=nan"], ["client.bound=-1.0"], ["client.bound=nan"], ["client.bound=inf"], ["central.bound=1.0"],
    ["algorithm=transfer", "algorithms.transfer.central_rounds=-1"],
    ["algorithm=fedprox", "algorithms.fedprox.mu=-1.0"], ["algorithm=fedprox", "algorithms.fedprox.mu=nan"],
    ["data.partition.kind=quantity_skew", "data.partition.sigma=nan"], ["data.partition.alpha=nan"],
    ["data.partition.alpha=-1.0"], ["data.validation=1.5"], ["data.validation=-0.1"], ["data.validation=nan"],
    ["data.label_noise=2.0"], ["data.label_noise=nan"], ["data.central.client_labels=[10**3]"],
    ["mixing.w_f=-1.0", "algorithm=parallel"], ["mixing.w_c=nan", "algorithm=parallel"], ["evaluate.every=0"],
    ["evaluate.best_of_last=0"], ["checkpoint.every=0"], ["model.hidden=[-1]"], ["model.hidden=[0]"],
    ["model.criterion=binary_cross_entropy"], ["model.criterion=squared_error"], ["model.weights=nosuch.bin"],
    ["schedule.delay=half_normal", "schedule.sd=nan"], ["schedule.delay=half_normal", "schedule.sd=-1.0"],
    ["schedule.dropout=2.0"], ["schedule.dropout=nan"], ["schedule.patience=nan"], ["simulator.memory=0"],
    ["simulator.chunk=-1"], ["device=privateuseone"], ["device=[/]"], ["seed=1.5"],
    ["algorithm=feddle", "algorithms.feddle.atlas=-1"], ["client.steps=10000000000000"],
    ["algorithm=lg_fedavg", "algorithms.lg_fedavg.layers=-1"], ["algorithm=fedbuff", "algorithms.fedbuff.buffer=-1"],
]  # fmt: skip
"""Settings that cannot be meant: to run with them is wrong."""


def case(trial: Trial) -> str:
    """A recipe that is damaged in one or two places, or one that is well formed and cannot be meant."""
    if trial.draw.random() < 0.25:
        wrong = trial.one_of(NONSENSE)
        settings = [word for setting in [*TINY, *wrong] for word in ("--set", setting)]
        return must_refuse(trial.command("run", "digits", *settings, "--out", trial.folder / "run"))
    base = trial.one_of(["digits", "digits", "lg-digits"])
    algorithm = "lg_fedavg" if base == "lg-digits" else trial.one_of(list(ALGORITHMS))
    small = [*TINY, f"algorithm={algorithm}", "algorithms.lg_fedavg.warm_start=1"]
    whole = toml.resolve(toml.override(toml.load(base), small)).table()
    whole["name"] = "tried"
    for _ in range(trial.one_of([1, 1, 2])):
        damage(trial, whole)
    text = written(whole)
    if trial.draw.random() < 0.3:
        text = torn(trial, text)
    file = trial.folder / "tried.toml"
    file.write_text(text, "utf-8", "surrogateescape")
    verb = trial.one_of([["run"], ["run"], ["run"], ["data"], ["compare", "--algorithms", "fedavg", "--no-probe"]])
    out = [] if verb == ["data"] else ["--out", trial.folder / "run"]
    return judged(trial.command(verb[0], file, *verb[1:], *out))


def damage(trial: Trial, whole: dict[str, Any]) -> None:
    """Changes one place of a recipe."""
    places = [path for path, _ in toml.leaves(whole) if path[0] != "name"]
    path = list(trial.one_of(places))
    how = trial.one_of(["value", "value", "value", "value", "add", "lose", "flatten", "deepen"])
    if how in ("flatten", "lose") and len(path) > 1:
        path = path[: trial.draw.randrange(1, len(path))]
    elif how == "add":
        path = [*path[:-1], trial.one_of([path[-1] + "s", path[-1][:-1] or "x", "[/]", "", "a.b", "x" * 300])]
    elif how == "deepen":
        path = [*path, "deeper"]
    value = trial.one_of(NASTY)
    trial.note(how, path, repr(value) if not isinstance(value, int) else f"{len(f'{value:x}')} hex digits")
    inner: Any = whole
    for part in path[:-1]:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    if how == "lose":
        inner.pop(path[-1], None)
    else:
        inner[path[-1]] = value


def torn(trial: Trial, text: str) -> str:
    """The text with some of it lost, doubled, nested or replaced."""
    how = trial.one_of(["cut", "flip", "double", "nest", "bytes", "dotted"])
    trial.note("text", how)
    place = trial.draw.randrange(len(text))
    if how == "cut":
        return text[:place]
    if how == "flip":
        return text[:place] + chr(trial.draw.randrange(1, 0x250)) + text[place + 1 :]
    if how == "double":
        lines = text.splitlines()
        return "\n".join([*lines, trial.one_of(lines)])
    if how == "nest":
        return text + "\ndeep = " + "[" * 3000 + "]" * 3000
    if how == "dotted":
        return text + "\n" + ".".join("d" * 2000) + " = 1"
    return text[:place] + "\udcff\udcfe" + text[place:]


def written(value: Any) -> str:
    """A table as TOML, also where its values are odd."""
    return "\n".join(f"{key(name)} = {inline(item)}" for name, item in value.items()) + "\n"


def key(name: str) -> str:
    """A key as TOML."""
    return name if name.replace("_", "").isalnum() and name.isascii() else json.dumps(name)


def inline(value: Any) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key(name)} = {inline(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return digits(value) if isinstance(value, int) else repr(value)


def digits(value: int) -> str:
    """A whole number in decimal, however long."""
    return str(value) if abs(value) < 10**300 else "1" + "0" * 400
