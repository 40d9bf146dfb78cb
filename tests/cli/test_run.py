"""``mixfed run``, ``list`` and ``data`` through a real process."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from mixfed.cli import app
from mixfed.experiments import toml

from .tools import TINY, environment, here, last_json, mixfed, refused

LEDGER = {"bytes_down", "bytes_up", "client_examples", "server_examples", "client_flops", "server_flops"}


def test_a_run_leaves_a_complete_folder(tmp_path: Path) -> None:
    done = mixfed("run", "digits", "--rounds", "4", "--seed", "3", *TINY, "--json", cwd=tmp_path)
    folder = tmp_path / "runs" / "digits-fedavg-seed3"
    assert {f.name for f in folder.iterdir()} == {
        "config.toml", "recipe.toml", "metrics.jsonl", "metrics.png", "model.safetensors", "result.json", "checkpoints",
        "facts.json", "report.html",
    }  # fmt: skip
    result = last_json(done)
    assert result == json.loads((folder / "result.json").read_text())
    assert set(result) == {
        "metrics",
        "ledger",
        "rounds",
        "seconds",
        "seed",
        "warnings",
        "faults",
        "versions",
        "simulation",
    }
    assert set(result["ledger"]) >= LEDGER
    assert (result["rounds"], result["seed"]) == (4, 3)
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry.pop("round") for entry in history] == [1, 2, 3, 4]
    assert history[-1] == result["metrics"]
    assert list(load_file(folder / "model.safetensors")) == ["1.bias", "1.weight", "3.bias", "3.weight"]
    config = tomllib.loads((folder / "config.toml").read_text())
    assert toml.resolve(config).table() == config
    assert (config["rounds"], config["seed"], config["cohort"]) == (4, 3, 3)
    assert "accuracy" in done.stdout
    assert str(Path("runs") / "digits-fedavg-seed3") in done.stdout
    assert "4/4" in done.stderr


def without_a_home() -> None:
    """No variable and no entry of this user says where home is."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)

    def nobody(number: int) -> None:
        raise KeyError(number)

    pwd.getpwuid = nobody  # type: ignore[assignment]


def test_a_run_needs_no_home(tmp_path: Path) -> None:
    mixfed("run", "digits", "--rounds", "2", *TINY, "--out", tmp_path / "run", before=without_a_home)
    assert (tmp_path / "run" / "result.json").exists()


def with_caches_in(folder: Path) -> None:
    os.environ |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


def test_nothing_is_remembered_outside_of_the_run_folder(tmp_path: Path) -> None:
    """So that no other file decides how a run is executed, and none that is damaged can stop it."""
    home = tmp_path / "home"
    home.mkdir()
    options = ["--rounds", "2", *TINY, "--executor", "auto", "--out", tmp_path / "run"]
    mixfed("run", "digits", *options, before=partial(with_caches_in, home))
    left = [file for file in home.rglob("*") if file.is_file()]
    assert [file for file in left if not {"matplotlib", "fontconfig"} & set(file.parts)] == []


def test_a_config_is_a_recipe_that_gives_the_same_model(tmp_path: Path) -> None:
    options = ["--algorithm", "fedadam", "--set", "algorithms.fedadam.learning_rate=0.05", "--executor", "vmap"]
    here("run", "digits", "--rounds", "3", *TINY, *options, "--out", tmp_path / "a")
    here("run", tmp_path / "a" / "config.toml", "--out", tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_list_names_everything() -> None:
    told = mixfed("list").stdout
    for name in ("fedavg", "gradient_2way", "oracle", "digits", "smile", "fashion-mnist"):
        assert f" {name} " in told


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, mixfed.cli; assert not {'torch', 'numpy', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
    whole = [sys.executable, "-m", "mixfed", "--help"]
    told = subprocess.run(whole, check=True, env=environment(), capture_output=True, text=True).stdout
    assert all(f" {command} " in told for command in ("run", "compare", "list", "data"))


def test_data_prints_and_draws_who_holds_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here("data", "digits", "--plot", tmp_path / "holdings.png")
    told = capsys.readouterr().out
    assert "50 clients" in told
    assert "centre" in told
    assert (tmp_path / "holdings.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_whose_updates_are_all_bad_stops_with_a_sentence(tmp_path: Path) -> None:
    options = ["--rounds", "9", *TINY, "--set", "client.learning_rate=1e30", "--out", tmp_path / "run"]
    done = mixfed("run", "digits", *options, expect=1)
    assert "not finite" in done.stderr
    assert not (tmp_path / "run" / "result.json").exists()


WITH_WEIGHTS = """
name = "weights"
rounds = 2
cohort = 8
[data]
source = "files"
clients = "clients.npz"
test = "test.npz"
client = "who"
normalise = "none"
[model]
name = "linear"
[client]
steps = 1
batch_size = 5
learning_rate = 0.1
"""


@pytest.fixture
def one_absurd_client(tmp_path: Path) -> Path:
    """A recipe of eight clients, of whom the fourth has inputs that are a million times as large."""
    draw = np.random.default_rng(0)
    x, who = draw.normal(size=(40, 3)).astype(np.float32), np.repeat(np.arange(8), 5)
    for name, scale in (("clients", np.where(who == 3, 1e6, 1.0)), ("test", np.ones(40))):
        inputs = (x * scale[:, None]).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=inputs, y=draw.integers(0, 2, 40), who=who)
    (tmp_path / "weights.toml").write_text(WITH_WEIGHTS)
    return tmp_path / "weights.toml"


def test_a_client_whose_updates_are_absurd_is_named_and_a_bound_is_offered(
    one_absurd_client: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):  # such a model is broken, too
        app(["run", str(one_absurd_client), "--executor", "loop", "--out", str(tmp_path / "run")])
    told = " ".join(capsys.readouterr().err.split())
    assert "client updates were more than 1,000 times as long as the median of their round: client 3 of" in told
    assert "To drop updates as long as these set client.bound=" in told
    (fault,) = json.loads((tmp_path / "run" / "result.json").read_text())["faults"]
    assert (fault["kind"], fault["client"]) == ("absurd", 3)


def test_a_bound_of_the_recipe_drops_such_updates(
    one_absurd_client: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here("run", one_absurd_client, "--executor", "loop", "--set", "client.bound=5", "--out", tmp_path / "run")
    assert "2 client updates were longer than the bound allows and were dropped" in capsys.readouterr().err
    (fault,) = json.loads((tmp_path / "run" / "result.json").read_text())["faults"]
    assert (fault["kind"], fault["client"], fault["times"]) == ("beyond the bound", 3, 2)
    assert all(x.abs().max() < 10 for x in load_file(tmp_path / "run" / "model.safetensors").values())


def test_the_best_of_the_last_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["run", "digits", "--rounds", "6", *TINY, "--executor", "loop"]
    here(*options, "--set", "evaluate.best_of_last=3", "--out", tmp_path / "run")
    history = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert len(history) == 6
    assert found["accuracy"] == max(entry["accuracy"] for entry in history[3:])
    assert found["loss"] == min(entry["loss"] for entry in history[3:])
    assert "at least 1" in refused(capsys, *options, "--set", "evaluate.best_of_last=0", "--out", tmp_path / "none")
