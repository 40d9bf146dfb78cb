"""A run folder under attack: two processes, edits, links, names and files of other shapes. One sentence each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mixfed.cli import app
from mixfed.core.loop import Record
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.build import build
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.running import run_in_folder

from .tools import here, refused

TINY = [
    *("data.partition.clients=10", "cohort=3", "rounds=4", "evaluate.every=1", "checkpoint.every=1"),
    *("simulator.executor=loop", "simulator.threads=1"),
]
COMMAND = ["run", "digits", *(word for setting in TINY for word in ("--set", setting))]


def tiny(*settings: str) -> Recipe:
    return toml.resolve(toml.override(toml.load("digits"), [*TINY, *settings]))


def stopped_after(rounds: int, folder: Path, *settings: str) -> RunFolder:
    """A run that was asked to stop after so many rounds."""
    done: list[int] = []

    def note(record: Record) -> None:
        done.append(record.round)

    run = RunFolder(folder)
    run_in_folder(build(tiny(*settings)), run, callbacks=[note], should_stop=lambda: len(done) >= rounds)
    assert len(done) == rounds
    return run


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def same(one: Path, other: Path, *names: str) -> None:
    for name in ("model.safetensors", "metrics.jsonl", *names):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


# One process at a time


def test_a_second_process_is_refused_at_once_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped_after(2, tmp_path / "run")
    with RunFolder(run.path).locked():  # a lock of its own, as in another process
        before = files(run.path)
        told = refused(capsys, *COMMAND, "--out", run.path, "--resume")
        assert "Another process is writing the run in" in told
        assert "Another process" in refused(capsys, *COMMAND, "--rounds", "9", "--out", run.path, "--resume")
        with pytest.raises(InputError, match="Another process"):
            run_in_folder(build(tiny()), run, resume=True)
        assert files(run.path) == before
    here(*COMMAND, "--out", run.path, "--resume")
    assert not (run.path / ".lock").exists()


def test_a_run_is_locked_from_its_beginning_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refusals: list[str] = []

    def try_another(record: Record) -> None:
        with pytest.raises(InputError) as refusal, RunFolder(tmp_path / "run").locked():
            pass
        refusals.append(str(refusal.value))

    run_in_folder(build(tiny()), RunFolder(tmp_path / "run"), callbacks=[try_another])
    assert len(refusals) == 4
    with RunFolder(tmp_path / "run").locked():
        pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    hold = "import sys, time, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire()"
    hold += "; print('held', flush=True); time.sleep(99)"
    other = subprocess.Popen([sys.executable, "-c", hold, tmp_path / ".lock"], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(InputError, match="Another process"), RunFolder(tmp_path).locked():
        pass
    other.kill()
    other.wait()
    with RunFolder(tmp_path).locked():
        pass


def test_a_folder_that_was_taken_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    run = stopped_after(2, tmp_path / "run")
    before = files(run.path)
    with pytest.raises(InputError, match="already holds a run"):
        run_in_folder(build(tiny()), RunFolder(run.path))
    assert files(run.path) == before


def test_what_dead_processes_left_is_cleaned_up(tmp_path: Path) -> None:
    run = stopped_after(2, tmp_path / "run")
    left = [run.path / ".config.toml.1a2b.partial", run.checkpoints / ".round-00000099.safetensors.3c4d.partial"]
    for file in left:
        file.write_bytes(b"half")
    run_in_folder(build(tiny()), run, resume=True)
    assert not any(file.exists() for file in left)


# Damage and identity


def test_damage_is_told_and_the_end_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stopped_after(3, tmp_path / "run")
    newest = sorted(run.checkpoints.glob("round-*"))[-1]
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    here(*COMMAND, "--out", run.path, "--resume")
    told = capsys.readouterr().err
    assert told.count(f"{newest} is damaged, so the run goes on from the checkpoint before, round-00000002.saf") == 1
    run_in_folder(build(tiny()), RunFolder(tmp_path / "whole"))
    same(run.path, tmp_path / "whole")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run = stopped_after(2, tmp_path / "run")
    other = stopped_after(2, tmp_path / "other", "client.learning_rate=0.3")
    shutil.rmtree(run.checkpoints)
    shutil.copytree(other.checkpoints, run.checkpoints)
    with pytest.raises(InputError, match="is a checkpoint of another run"):
        run_in_folder(build(tiny()), run, resume=True)


@pytest.mark.parametrize("edit", ["value", "comment", "checksum"])
def test_an_edited_config_is_refused(edit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stopped_after(2, tmp_path / "run")
    text = run.config.read_text()
    edited = {
        "value": text.replace("learning_rate = 0.1", "learning_rate = 0.2", 1),
        "comment": text + "# mine\n",
        "checksum": text.partition("\n")[2],
    }[edit]
    assert edited != text
    run.config.write_text(edited)
    assert "config.toml is not as the run wrote it" in refused(capsys, *COMMAND, "--out", run.path, "--resume")
    here("run", run.config, "--out", tmp_path / "copy")  # as a recipe it is as good as any


def test_the_simulators_settings_may_be_written_anew_and_are_restored(tmp_path: Path) -> None:
    """What a run chose for itself is neither refused nor forgotten when the same command goes on with it."""
    as_asked = tiny("simulator.executor=auto")
    run = stopped_after(2, tmp_path / "run", "simulator.executor=auto")
    chosen = replace(as_asked, simulator=replace(as_asked.simulator, executor="vmap", chunk=2))
    run.write_config(chosen)
    run.adopt(as_asked)
    run_in_folder(build(as_asked), run, resume=True)
    assert run.stored() == chosen
    assert run.finished() is not None
    with pytest.raises(InputError, match=r"simulator\.executor = 'vmap', and a resumed one cannot have 'loop'"):
        run.adopt(tiny("simulator.executor=loop"))

    killed = RunFolder(tmp_path / "killed")  # before its first checkpoint
    killed.write_config(chosen)
    run_in_folder(build(as_asked), killed, resume=True)
    run_in_folder(build(chosen), RunFolder(tmp_path / "whole"))
    same(killed.path, tmp_path / "whole")


def test_a_run_goes_on_with_the_cores_that_it_began_with(tmp_path: Path) -> None:
    """Other cores in an operator add numbers in another order, so that a resumed run would be neither run."""
    settings = ("algorithm=gradient_2way", "simulator.threads=0")
    used: set[int] = set()

    def note(record: Record) -> None:
        used.add(torch.get_num_threads())

    assert torch.get_num_threads() == 1
    run = stopped_after(2, tmp_path / "run", *settings)
    torch.set_num_threads(2)
    try:
        run.adopt(tiny(*settings))
        run_in_folder(build(tiny(*settings)), run, resume=True, callbacks=[note])
    finally:
        torch.set_num_threads(1)
    assert used == {1}
    found = run.finished()
    assert found is not None
    assert found["simulation"] == {"backend": "simulator", "cores": 1, "threads": 0, "executions": {"": "loop"}}
    run_in_folder(build(tiny(*settings)), RunFolder(tmp_path / "whole"))
    same(run.path, tmp_path / "whole")


# More rounds, and edited recipes


def test_more_rounds_leave_the_metrics_of_a_run_of_that_length(tmp_path: Path) -> None:
    every = "evaluate.every=3"
    run_in_folder(build(tiny(every)), RunFolder(tmp_path / "run"))
    longer = tiny(every, "rounds=7")
    RunFolder(tmp_path / "run").adopt(longer)
    run_in_folder(build(longer), RunFolder(tmp_path / "run"), resume=True)
    run_in_folder(build(longer), RunFolder(tmp_path / "whole"))
    same(tmp_path / "run", tmp_path / "whole")
    assert [entry["round"] for entry in RunFolder(tmp_path / "run").history()] == [3, 6, 7]


def test_transfer_is_not_made_longer_unless_its_plan_is_fixed(tmp_path: Path) -> None:
    run = stopped_after(3, tmp_path / "run", "algorithm=transfer")
    with pytest.raises(InputError, match="gave half of its 4 rounds to the centre"):
        run.adopt(tiny("algorithm=transfer", "rounds=8"))
    fixed = ["algorithm=transfer", "algorithms.transfer.central_rounds=3"]
    run = stopped_after(3, tmp_path / "fixed", *fixed)
    longer = tiny(*fixed, "rounds=8")
    run.adopt(longer)
    run_in_folder(build(longer), run, resume=True)
    run_in_folder(build(longer), RunFolder(tmp_path / "whole"))
    same(run.path, tmp_path / "whole")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A user's own recipe."""
    file = tmp_path / "mine.toml"
    file.write_text("base = 'digits'\nrounds = 3\ncohort = 3\n[client]\nlearning_rate = 0.05\nclip = 9.0\n")
    return file


def test_an_edited_recipe_is_not_ignored(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go = ["run", recipe, "--executor", "loop", "--out", tmp_path / "run"]
    text = recipe.read_text()
    here(*go, "--set", "client.learning_rate=0.2", "--set", "evaluate.every=1")
    (tmp_path / "run" / "result.json").unlink()
    recipe.write_text(text.replace("cohort = 3", "cohort = 4"))
    assert "has cohort = 3, and a resumed one cannot have 4" in refused(capsys, *go, "--resume")
    recipe.write_text(text.replace("cohort = 3", ""))
    assert "cannot have 10" in refused(capsys, *go, "--resume")  # which the base says
    recipe.write_text(text.replace("clip = 9.0", ""))
    assert "began with a recipe that says client.clip = 9.0" in refused(capsys, *go, "--resume")
    recipe.write_text(text + "batch_size = 7\n")
    assert "client.batch_size" in refused(capsys, *go, "--resume")
    recipe.write_text(text)
    here(*go, "--resume")  # settings of the command line need not be said again
    recipe.write_text(text.replace("rounds = 3", "rounds = 5"))
    here(*go, "--resume")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 5


def test_an_edited_record_of_the_recipe_is_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = ["run", recipe, "--executor", "loop", "--out", tmp_path / "run"]
    here(*go)
    record = tmp_path / "run" / "recipe.toml"
    record.write_text(record.read_text().replace("cohort = 3", "cohort = 4"))
    assert "recipe.toml is not as the run wrote it" in refused(capsys, *go, "--resume")


def test_a_run_without_a_record_is_compared_with_all_that_the_recipe_says(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    here("compare", recipe, "--algorithms", "fedavg", "--executor", "loop", "--out", out)
    here("run", recipe, "--resume", "--out", out / "fedavg-seed0")
    recipe.write_text(recipe.read_text().replace("0.05", "0.06"))
    told = refused(capsys, "run", recipe, "--resume", "--out", out / "fedavg-seed0")
    assert "client.learning_rate = 0.05, and a resumed one cannot have 0.06" in told


# Links, names, and files of other shapes


WRITTEN = sorted(path.name for path in vars(RunFolder("")).values() if isinstance(path, Path) and path.suffix)


@pytest.mark.parametrize("name", [*WRITTEN, ".lock", "checkpoints", "checkpoints/private"])
def test_links_are_not_followed(name: str, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    target = away if name.startswith("checkpoints") else away / "file"
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    with pytest.raises(InputError, match="is a symbolic link, and a run writes into its own folder only"):
        run_in_folder(build(tiny()), RunFolder(tmp_path / "run"))
    assert not list(away.iterdir())


def test_a_link_that_comes_later_is_not_followed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")

    def link(record: Record) -> None:
        if record.round == 2:
            run.metrics.unlink()
            os.symlink(tmp_path / "away", run.metrics)

    with pytest.raises(InputError, match=r"Cannot write .*metrics\.jsonl"):
        run_in_folder(build(tiny()), run, callbacks=[link])
    assert not (tmp_path / "away").exists()


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "a\\\\b", ".."])
def test_names_stay_under_runs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "a" / "b"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    commands = (["run", "digits"], ["compare", "digits", "--algorithms", "fedavg"], ["probe", "digits"])
    for command in commands if name != ".." else (["run", "lg-synthetic"],):
        told = refused(capsys, *command, "--set", f"name='{name}'")
        assert "is no name for a folder under runs/" in told
    assert not list(home.iterdir())


def test_an_empty_out_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (COMMAND, ["compare", "digits", "--algorithms", "fedavg"]):
        assert "--out and --data take the name of a folder" in refused(capsys, *command, "--out", "")
    assert not list(tmp_path.iterdir())


SHAPES = {
    "a list": "[1, 2]",
    "a number": "3",
    "no metrics": '{"ledger": {}, "rounds": 4, "seconds": 1, "seed": 0}',
    "metrics of another kind": '{"metrics": 3, "ledger": {}, "rounds": 4, "seconds": 1, "seed": 0}',
    "a text for a number": '{"metrics": {"loss": "x"}, "ledger": {}, "rounds": 4, "seconds": 1, "seed": 0}',
    "cut": '{"metrics": {"los',
    "deep": "[" * 100_000,
    "no text": "\udcff",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_result_of_another_shape_is_a_sentence(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stopped_after(2, tmp_path / "run")
    run.result.write_bytes(SHAPES[shape].encode(errors="surrogateescape"))
    assert str(run.result) in refused(capsys, *COMMAND, "--out", run.path, "--resume")


@pytest.mark.parametrize(
    "line", ['{"round": 99, "lo', "[3]", "{}", '{"round": "x"}', '{"round": 5, "loss": "x"}', "\udcff"]
)
def test_metrics_of_another_shape_are_a_sentence(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go = ["compare", "digits", "--algorithms", "fedavg", *COMMAND[2:], "--out", tmp_path]
    run = RunFolder(tmp_path / "fedavg-seed0")
    run_in_folder(build(tiny()), run)
    with open(run.metrics, "ab") as file:
        file.write(line.encode(errors="surrogateescape"))
    told = refused(capsys, *go, "--resume")
    assert f"Line 5 of {run.metrics}" in told


@pytest.mark.parametrize("every", [1, 100])
def test_the_last_good_checkpoint_is_named_only_where_there_is_one(
    every: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All updates are infinite, and the run stops in its second round."""
    settings = ["--set", "client.learning_rate=1e30", "--set", f"checkpoint.every={every}"]
    with pytest.raises(SystemExit) as stop:
        app([str(word) for word in (*COMMAND, *settings, "--out", tmp_path / "run")])
    told = capsys.readouterr().err
    assert stop.value.code == 1, told
    assert ("The last good checkpoint" in told) == (every == 1)


def test_a_refused_run_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(capsys, *COMMAND, "--set", "cohort=500")
    assert not list(tmp_path.iterdir())
