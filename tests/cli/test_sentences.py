"""Whatever a user writes, names or has for a terminal: a sentence or a result, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mixfed.algorithms.feddle.atlas import Atlas
from mixfed.cli.common import reported
from mixfed.cli.console import sentence
from mixfed.core.device import usable_device
from mixfed.errors import InputError, require_memory
from mixfed.experiments import toml
from mixfed.experiments.build import build

from .test_summaries import study
from .tools import TINY, WAIT, environment, here, refused

DIGITS = "9" * 400
NINES = "9" * 5000
DEEP = "[" * 3000 + "]" * 3000

BAD_SETTINGS = {
    f"rounds={DIGITS}": "'rounds' takes a whole number of at most 64 bits",
    f"client.learning_rate={DIGITS}": "of at most 64 bits",
    f"client.learning_rate={NINES}": "too long",
    f"seed={DIGITS}": "of at most 64 bits",
    "client.learning_rate=nan": "that is finite",
    "client.learning_rate=1e999": "that is finite",
    f"model.hidden={DEEP}": "nested too deeply",
    "a." * 3000 + "b=1": "no key has so many parts",
    "title=\udcff": "a text in Unicode",
    "client.optimizer=[1]": "'client.optimizer' takes a text",
    "algorithm=[1]": "'algorithm' takes a text",
    "client.steps=1000000000000": "client.steps = 1000000000000 takes 240,000,000,000,000 bytes",
    "central.steps=1000000000000": "central.steps = 1000000000000 takes",
    "client={steps=0,epochs=1000000000000}": "client.epochs = 1000000000000 takes",
    "central={steps=0,epochs=1000000000000}": "central.epochs = 1000000000000 takes",
    "auxiliary.hidden=[-4]": "'auxiliary.hidden' must be at least 1, not -4",
    "mixing.w_f=-1": "mixing.w_f",
    "model.name=cnn": "The network 'cnn' needs model.channels, which this source does not determine.",
    "client.betas=[0.9]": "'client.betas' takes 2 values, not 1",
    "client.betas=0.9": "'client.betas' takes a list",
    "client.betas=['a', 'b']": "'client.betas' takes a number",
    "client.betas=[-1, 0.5]": "'client.betas' must be at least 0 and below 1, not -1.0",
    "client.betas=[2, 3]": "'client.betas' must be at least 0 and below 1",
    "server.momentum=5": "'server.momentum' must be at least 0 and below 1",
    "server.weight_decay=-5": "'server.weight_decay' must be at least 0",
    "client.epsilon=-1": "'client.epsilon' must be a number above 0",
    "client.decay=-1": "'client.decay' must be above 0 and at most 1",
    "device=privateuseone": "'privateuseone' cannot be used here",
    "device=meta": "'meta' cannot be used here",
    "device=mps": "'mps' cannot be used here",
    "evaluate.metrics=['parity_gap']": "data.protected",
    "evaluate.sets=['local']": "data.own_test",
    "evaluate.on=centre": "data.central.validation",
}

COMMAND = [sys.executable, "-c", "import sys; sys.argv[0] = 'mixfed'; from mixfed.cli import main; main()"]
"""The command in a fresh interpreter: what it loads, and how it writes, is at stake."""


@pytest.mark.parametrize("setting", BAD_SETTINGS, ids=lambda text: text[:40].encode("ascii", "replace").decode())
def test_a_bad_setting_is_refused(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = ["client.optimizer=adam", "auxiliary.kind=supervised" if setting.startswith("aux") else "rounds=2"]
    command = [word for text in [*others, setting] for word in ("--set", text)]
    told = refused(capsys, "run", "digits", *TINY, *command, "--out", tmp_path / "run")
    assert BAD_SETTINGS[setting] in told
    assert len(told) < 600
    assert not (tmp_path / "run").exists()


def test_numbers_of_options_and_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare = ["compare", "digits", "--algorithms", "fedavg", "--out", tmp_path / "run", "--seeds"]
    assert "of at most 64 bits" in refused(capsys, *compare, DIGITS)
    assert "A seed is a whole number" in refused(capsys, *compare, NINES)
    assert "of at most 64 bits" in refused(capsys, "run", "digits", "--seed", DIGITS, "--out", tmp_path / "run")
    assert "not an empty text" in refused(capsys, "run", "digits", "--out", "")
    file = tmp_path / "mine.toml"
    for text, told in (
        (f"rounds = {NINES}", "not valid TOML"),
        (f"x = {DEEP}", "nested too deeply"),
        (f"{'a.' * 200}b = 1", "nested too deeply"),
    ):
        file.write_text(text)
        assert told in refused(capsys, "run", file)
        assert told in refused(capsys, "study", file)
        assert told in refused(capsys, "run", "digits", "--tuned", file)


MALFORMED = {
    "points = 3": "'points' takes one or more tables",
    "points = []": "'points' takes one or more tables",
    "points = [1]": "a point has the keys label and set",
    "[[points]]\nlabel = 'a'": "a point has the keys label and set",
    "[[points]]\nlabel = 1\nset = []": "'label' takes a text",
    "[[points]]\nlabel = 'a'\nset = 'rounds=1'": "'set' takes a list",
    "[[points]]\nlabel = 'a'\nset = [1]": "'set' takes a text",
    "algorithms = 'fedavg'": "'algorithms' takes a list",
    "algorithms = []": "one or more different names",
    "algorithms = ['fedavg', 'fedavg']": "one or more different names",
    "metric = ['loss']": "'metric' takes a text",
    "recipe = 3": "'recipe' takes a text",
    "set = 'rounds=1'": "'set' takes a list",
    "sets = []": "did you mean 'set'",
}


@pytest.mark.parametrize("wrong", MALFORMED)
def test_a_study_of_wrong_types(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = {"title": "'t'", "recipe": "'digits'", "algorithms": "['fedavg']", "metric": "'loss'"}
    key = wrong.partition(" =")[0]
    lines = [f"{name} = {value}" for name, value in right.items() if name != key]
    point = "" if "points" in wrong else "[[points]]\nlabel = 'a'\nset = []"
    (tmp_path / "wrong.toml").write_text("\n".join([*lines, wrong, point]))
    told = refused(capsys, "study", tmp_path / "wrong.toml", "--out", tmp_path / "out")
    assert "The study 'wrong' is not well formed" in told
    assert MALFORMED[wrong] in told


@pytest.mark.parametrize("name", ["[red]", "[/]", "a[/red]b", ":smile:", "cost $x^{$"])
def test_names_are_shown_as_they_are(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / name.replace("/", "")
    out = folder / "[/]"
    title = ["--set", f"title={name}", "--set", f"name={name}"]
    here("run", "digits", "--rounds", "1", *TINY, "--executor", "loop", *title, "--out", out)
    told = capsys.readouterr().out
    assert f"Run folder: {out}" in told
    assert f"{name} · 1 rounds" in told
    file = study(tmp_path, second=name, settings="set = ['rounds=1', 'simulator.executor=loop']")
    here("study", file, *TINY, "--out", folder / "study")
    assert name in capsys.readouterr().out
    assert (folder / "study" / "study.png").exists()
    assert f"'{name}'" in refused(capsys, "run", name)
    assert f"'{name}'" in refused(capsys, "run", "digits", "--algorithm", name)


def test_a_picture_of_an_unknown_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ends in .png, .svg" in refused(capsys, "data", "digits", "--plot", tmp_path / "x.nosuch")
    assert "it is a folder" in refused(capsys, "data", "digits", "--plot", "/")
    here("data", "digits", "--plot", tmp_path / "plain")
    assert (tmp_path / "plain").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("encoding", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "LC_ALL": "C", "LANG": "C"}])
def test_a_terminal_of_few_letters_shows_the_result(encoding: dict[str, str], tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('base = "digits"\nname = "Größe±"\n', encoding="utf-8")
    options = ["--rounds", "1", *TINY, "--executor", "loop", "--out", tmp_path / "ü"]
    done = subprocess.run(
        [*COMMAND, "run", recipe, *options, "--json"],
        env=environment() | {"PYTHONCOERCECLOCALE": "0"} | encoding,
        capture_output=True,
        timeout=WAIT,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rounds"] == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("runs already holds a run.", "runs already holds a run."),
        ("alpha is 0.0; give a positive number.", "alpha is 0.0; give a positive number."),
        ("fedavg sends no 'x'", "fedavg sends no 'x'."),
        ("there is no source 'x'", "There is no source 'x'."),
        ("no data folder is known", "No data folder is known."),
    ],
)
def test_a_name_at_the_beginning_keeps_its_letter(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    sentence(text)
    assert capsys.readouterr().err == f"{shown}\n"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 7.28 TiB for an array"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        OverflowError("int too large to convert to float"),
        RecursionError("maximum recursion depth exceeded"),
    ],
)
def test_the_machine_s_limits_are_sentences(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    with pytest.raises(typer.Exit) as stop, reported():
        raise error
    assert stop.value.exit_code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(RuntimeError, match="a mistake"), reported():
        raise RuntimeError("a mistake of the program")


def test_what_does_not_fit_into_memory_is_said_with_its_size() -> None:
    require_memory("Nothing", 0, "go on")
    with pytest.raises(
        InputError,
        match=r"^A thing takes 1,000,000,000,000,000 bytes, and this machine has [\d,]+ of memory; buy more\.$",
    ):
        require_memory("A thing", 10**15, "buy more")
    with pytest.raises(InputError, match=r"An atlas of 1000000000000 anchors takes 8,000,000,000,000 bytes"):
        Atlas.empty(10**12, 2, 32, torch.device("cpu"), torch.float32)


def test_a_device_that_is_there() -> None:
    assert usable_device("cpu").type == "cpu"
    for absent in ("privateuseone", "meta", "hpu", "vulkan", "nonsense", ""):
        with pytest.raises(InputError, match="cannot be used here"):
            usable_device(absent)


def test_shares_so_small_that_no_client_has_a_test_example() -> None:
    settings = ["data.own_test=0.001", "evaluate.sets=['local']"]
    with pytest.raises(InputError, match=r"data\.own_test"):
        build(toml.resolve(toml.override(toml.load("digits"), settings)))


def test_a_refused_name_does_not_wait_for_torch(tmp_path: Path) -> None:
    """Loading PyTorch takes seconds; here it cannot be loaded at all."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    for command, told in (
        (["run", "digitz"], "There is no recipe 'digitz'"),
        (["study", "smile-central-bach"], "There is no study"),
        (["compare", str(tmp_path / "bad.toml"), "--algorithms", "fedavg"], "is not valid TOML"),
        (["run", "digits", "--nonsense"], "No such option"),
    ):
        done = subprocess.run(
            [*COMMAND, *command], env=environment() | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=WAIT
        )
        assert done.returncode == 2, done.stderr
        assert told in done.stderr
