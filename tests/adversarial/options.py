"""Odd options of all commands, odd studies and tuned settings, and odd surroundings."""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.adversarial.trial import Told, Trial, Wrong, judged, must_refuse

TINY = [
    *("--set", "data.partition.clients=6", "--set", "cohort=2", "--set", "client.steps=1", "--set", "central.steps=1"),
    *("--set", "evaluate.every=1", "--executor", "loop"),
]
ODD = [
    "", " ", "0", "-1", "1e3", "9" * 400, "nan", "[bold]", "[/]", "[/nosuch]", "../../x", "/", ".", "a,b", ",", ",,",
    "01,1", "1,1", "é\U0001f4a5", "a" * 300, "a=b", "=", "x=[", "client=1", "x" + ".y" * 500 + "=1", "nosuch", "-",
    "--help", "/dev/full", "/dev/null", "/proc/self/mem", "\udcff",
]  # fmt: skip
OPTIONS = {
    "run": ["--algorithm", "--set", "--rounds", "--seed", "--data", "--device", "--tuned", "--out", "--backend"],
    "compare": ["--algorithms", "--seeds", "--set", "--rounds", "--data", "--device", "--tuned", "--out"],
    "tune": ["--algorithms", "--grid", "--trials", "--on", "--metric", "--last", "--seeds", "--set", "--out"],
    "study": ["--recipe", "--seeds", "--set", "--rounds", "--out"],
    "probe": ["--rounds", "--repeats", "--set", "--seed", "--device", "--out"],
    "split": ["--set", "--rounds", "--seed", "--device"],
    "data": ["--plot", "--set", "--seed", "--data"],
    "report": ["--out"],
    "export": ["--to", "--out"],
    "flower init": ["--set", "--algorithm", "--data", "--rounds", "--seed"],
}
NEEDED = {
    "run": ["digits", "--rounds", "1", *TINY, "--out", "out"],
    "compare": ["digits", "--algorithms", "fedavg", "--rounds", "1", "--no-probe", *TINY, "--out", "out"],
    "tune": ["digits", "--algorithms", "fedavg", "--grid", "client.learning_rate=0.1,0.2", "--rounds", "1",
             "--set", "data.validation=0.2", *TINY, "--out", "out"],
    "study": ["study.toml", "--rounds", "1", *TINY, "--out", "out"],
    "probe": ["digits", "--rounds", "1", "--repeats", "1", *TINY[:-2], "--out", "out"],
    "split": ["lg-digits", "--rounds", "1", "--set", "client.epochs=1", "--set", "algorithms.lg_fedavg.warm_start=0"],
    "data": ["digits", "--plot", "holdings.png"],
    "report": ["out"],
    "export": ["out"],
    "flower init": ["app", "--recipe", "digits"],
}  # fmt: skip
STUDY = """
title = "t"
recipe = "digits"
algorithms = ["fedavg"]
metric = "accuracy"
[[points]]
label = "one"
set = ["client.learning_rate=0.1"]
[[points]]
label = "two"
set = ["client.learning_rate=0.2"]
"""


def case(trial: Trial) -> str:
    """One of the kinds below."""
    return trial.one_of([odd_option, odd_option, odd_option, odd_study, odd_surroundings, nonsense, odd_report])(trial)


def odd_option(trial: Trial) -> str:
    """A command with one option replaced."""
    (trial.folder / "study.toml").write_text(STUDY)
    verb = trial.one_of(list(OPTIONS))
    return judged(trial.command(*verb.split(), *NEEDED[verb], trial.one_of(OPTIONS[verb]), trial.one_of(ODD)))


def odd_report(trial: Trial) -> str:
    """The page of a run, or its network, where some file is not as it was written."""
    if trial.command("run", *NEEDED["run"]).code:
        raise Wrong("a good run failed")
    file = trial.one_of(
        ["result.json", "metrics.jsonl", "config.toml", "model.safetensors", "report.html", "metrics.png"]
    )
    how = trial.one_of(["gone", "empty", "cut", "flipped", "a folder", "of another kind"])
    path = trial.folder / "out" / file
    trial.note(file, how)
    content = bytearray(path.read_bytes()) if path.is_file() else bytearray(b"x" * 9)
    path.unlink(missing_ok=True)
    if how == "a folder":
        path.mkdir()
    elif how != "gone":
        content[trial.draw.randrange(len(content))] ^= 1 << trial.draw.randrange(8)
        changed = {"empty": b"", "cut": content[: len(content) // 2], "flipped": content}
        path.write_bytes(changed.get(how, b'[{"round": "x"}, 3]\n'))
    if trial.draw.random() < 0.5:
        return judged(trial.command("export", "out", *trial.one_of([[], ["--out", "x/y.pt"], ["--out", "out"]])))
    return judged(trial.command("report", *trial.one_of([["out"], ["out", "out"], ["out", "nosuch"], ["."]])))


def odd_study(trial: Trial) -> str:
    """A study whose text is changed in one place."""
    old, new = trial.one_of([
        ('"t"', "3"), ('"t"', '"[/]"'), ('"digits"', "7"), ('"digits"', '"nosuch"'), ('["fedavg"]', '"fedavg"'),
        ('["fedavg"]', "[]"), ('["fedavg"]', "[1]"), ('["fedavg"]', '["fedavg", "fedavg"]'), ('"one"', "1"),
        ('"one"', '"[/]"'), ('"one"', '"../x"'), ('["client.learning_rate=0.1"]', "1"),
        ('["client.learning_rate=0.1"]', "[1]"), ('["client.learning_rate=0.1"]', '["nosuch=1"]'),
        ("[[points]]", "[points]"), ('label = "one"', ""), ("metric", "metrics"), ('"accuracy"', "1"),
    ])  # fmt: skip
    (trial.folder / "study.toml").write_text(STUDY.replace(old, new))
    trial.note("study", old, "→", new)
    return judged(trial.command("study", *NEEDED["study"]))


def nonsense(trial: Trial) -> str:
    """What cannot be meant, and must be refused."""
    file = trial.folder / "study.toml"
    tries: dict[str, Callable[[], Told]] = {
        "no out": lambda: trial.command("run", *NEEDED["run"][:-1], ""),
        "a seed twice": lambda: trial.command("compare", *NEEDED["compare"], "--seeds", "01,1"),
        "no such picture": lambda: trial.command("data", "digits", "--plot", "x.nosuch"),
        "no such device": lambda: trial.command("run", *NEEDED["run"], "--device", "privateuseone"),
        "a misspelt metric": lambda: trial.command("study", *NEEDED["study"]),
        "a label twice": lambda: trial.command("study", *NEEDED["study"]),
        "a grid over for": lambda: trial.command(
            "tune", *NEEDED["tune"], "--grid", "for.fedavg.client.learning_rate=0.1,0.2"
        ),
        "out of runs": lambda: trial.command("run", *NEEDED["run"][:-2], "--set", "name=../../out"),
    }
    what = trial.one_of(list(tries))
    trial.note(what)
    changed = {"a misspelt metric": ('"accuracy"', '"acuracy"'), "a label twice": ('"two"', '"one"')}
    file.write_text(STUDY.replace(*changed.get(what, ("", ""))))
    inner = trial.folder / "a" / "b"
    if what == "out of runs":
        inner.mkdir(parents=True)
        os.chdir(inner)
    return must_refuse(tries[what]())


def odd_surroundings(trial: Trial) -> str:
    """A run that must end well wherever it is started: no home, a cache that is a file, a terminal that is narrow."""
    what = trial.one_of(["no home", "cache is a file", "ascii", "narrow", "no columns", "markup folder", "odd name"])
    trial.note(what)
    (trial.folder / "file").write_text("")
    encoding, out = "utf-8", "out"
    if what == "no home":
        for name in ("HOME", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        os.setuid(54321) if os.getuid() == 0 and _open_to_all(trial) else None
    elif what == "cache is a file":
        os.environ["XDG_CACHE_HOME"] = str(trial.folder / "file")
    elif what == "ascii":
        encoding = "ascii"
    elif what == "narrow":
        os.environ["COLUMNS"] = "1"
    elif what == "no columns":
        os.environ["COLUMNS"] = "0"
    else:
        out = "[bold]x[" if what == "markup folder" else "[/] \U0001f4a5 é"
    told = trial.command("run", *NEEDED["run"][:-1], out, "--executor", "auto", "--json", encoding=encoding)
    if told.code:
        raise Wrong(f"a good run ended with {told.code}: {told.err[-300:]}")
    if not (trial.folder / out / "result.json").exists():
        raise Wrong("a good run left no result")
    return "fine"


def _open_to_all(trial: Trial) -> bool:
    """Lets another user write into the case's folder."""
    trial.folder.chmod(0o777)
    return True
