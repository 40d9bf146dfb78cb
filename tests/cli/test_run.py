"""``mixfed run``, ``list`` and ``data`` through a real process."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file

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


def test_the_best_of_the_last_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["run", "digits", "--rounds", "6", *TINY, "--executor", "loop"]
    here(*options, "--set", "evaluate.best_of_last=3", "--out", tmp_path / "run")
    history = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]
    assert len(history) == 6
    assert found["accuracy"] == max(entry["accuracy"] for entry in history[3:])
    assert found["loss"] == min(entry["loss"] for entry in history[3:])
    assert "at least 1" in refused(capsys, *options, "--set", "evaluate.best_of_last=0", "--out", tmp_path / "none")
