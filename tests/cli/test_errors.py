"""Whatever is wrong with the input: one sentence, exit code 2, no traceback."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path

import pytest

from .tools import TINY, mixfed, refused

BAD_SETTINGS = {
    "client.learning_rat=0.1": "did you mean 'client.learning_rate'",
    "client.momentom=0.1": "did you mean 'client.momentum'",
    "clinet.learning_rate=0.1": "no setting 'clinet'; did you mean 'client'",
    "learning_rate=0.1": "did you mean 'client.learning_rate'",
    "lr=0.1": "did you mean 'client.learning_rate'",
    "data.partition.alhpa=1": "did you mean 'data.partition.alpha'",
    "model.hiden=[3]": "did you mean 'model.hidden'",
    "algorithms.fedprox.my=1": "did you mean 'algorithms.fedprox.mu'",
    "algorithms.fedprx.mu=1": "did you mean 'fedprox'",
    "roundz=3": "did you mean 'rounds'",
    "client.steps=five": "'client.steps' takes a whole number, not 'five'",
    "client.steps=2.5": "takes a whole number",
    "client.learning_rate=true": "takes a number",
    "client=3": "is a section",
    "rounds.x=3": "is a single value",
    "model.hidden=[64, 'a']": "takes a whole number",
    "evaluate.metrics=['acuracy']": "did you mean 'accuracy'",
    "client.optimizer=sdg": "choose from sgd, adam, yogi, adagrad",
    "model.name=mpl": "did you mean 'mlp'",
    "model.dtype=int8": "choose from float32, float64, bfloat16",
    "data.partition.kind=dirichle": "did you mean 'dirichlet'",
    "data.source=digitz": "did you mean 'digits'",
    "nonsense": "key=value",
    "cohort=500": "cohort of 500 clients cannot be drawn from the 50",
    "rounds=0": "at least 1",
    "client.epochs=2": "either client.steps or client.epochs",
    "client.learning_rate=-1": "'client.learning_rate' must be at least 0",
    "model.outputs=3": "labels",
    "model.inputs=10": "does not take",
    "data.central.client_labels=[77]": "No example has label 77",
    "data.central.client_labels=[]": "client_labels",
    "data.central.kind=fraction": "data.central.fraction",
    "data.partition.kind=natural": "no natural clients",
    "data.partition.kind=shards": "needs data.partition.classes_per_client",
    "data.partition.clients=5000": "too few for 5000 clients",
    "data.held_out=0.2": "no people can be held out",
    "evaluate.on=validation": "set data.validation to a share above 0",
    "device=nonsense": "device 'nonsense' cannot be used",
    "evaluate.metrics=['auc']": "AUC needs",
    "simulator.threads=-1": "at least 1",
}


@pytest.mark.parametrize("setting", BAD_SETTINGS)
def test_a_bad_setting_is_refused(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "run", "digits", "--set", "rounds=2", "--set", setting, "--out", tmp_path / "run")
    assert BAD_SETTINGS[setting] in told
    assert not (tmp_path / "run").exists()  # so that the mended command can have the folder


def test_names_files_and_folders_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", tmp_path / "run"]
    assert "did you mean 'digits'" in refused(capsys, "run", "digit", *out)
    assert "did you mean 'fedavg'" in refused(capsys, "run", "digits", "--algorithm", "fedavgg", *out)
    assert "No such file" in refused(capsys, "run", tmp_path / "none.toml", *out)
    assert "fashion-mnist" in refused(capsys, "run", "fashion-split", "--data", tmp_path, *out)
    assert "does not exist" in refused(capsys, "data", "smile", "--data", tmp_path / "no")
    assert "whole number" in refused(capsys, "compare", "digits", "--algorithms", "fedavg", "--seeds", "a", *out)
    assert "different names" in refused(capsys, "compare", "digits", "--algorithms", "fedavg,fedavg", *out)
    assert not (tmp_path / "run").exists()


def test_files_that_are_damaged_or_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("rounds = = 3")
    assert "not valid TOML" in refused(capsys, "run", bad)
    bad.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refused(capsys, "run", bad)
    bad.write_text("[data]\nsource = 'digits'\nsuorce = 'x'\n")
    assert "did you mean 'data.source'" in refused(capsys, "run", bad)
    assert "is a file" in refused(capsys, "run", "digits", "--out", bad)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("rounds = ")
    assert "is damaged" in refused(capsys, "run", "digits", "--resume", "--out", tmp_path / "run")
    (tmp_path / "faces_smile_32.npz").write_bytes(b"PK half a file")
    assert "cannot be read" in refused(capsys, "run", "smile", "--data", tmp_path, "--out", tmp_path / "smile")


@pytest.mark.parametrize("room", [500, 8_000], ids=["for nothing", "for no checkpoint"])
def test_a_full_disk_is_one_sentence(room: int, tmp_path: Path) -> None:
    """A limit on the size of files stands in for a disk without room."""
    little_room = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (room, room))
    done = mixfed(
        "run", "digits", "--rounds", "3", *TINY, "--executor", "loop", "--out", tmp_path / "run",
        expect=2, before=little_room,
    )  # fmt: skip
    assert "Cannot write" in done.stderr
    assert not list(tmp_path.rglob("*.partial"))


ON_DISK = {
    "private parts": ["lg-digits", "client.epochs=1", "simulator.private=disk", "algorithms.lg_fedavg.warm_start=0"],
    "messages in flight": ["digits", "schedule.delay=half_normal", "schedule.sd=2.0", "simulator.in_flight=disk"],
    "anchors": ["digits", "algorithm=feddle", "algorithms.feddle.anchors=disk"],
}


@pytest.mark.parametrize("what", ON_DISK)
def test_a_full_disk_behind_mapped_files_is_one_sentence(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is asked for before a file is mapped; to write into a mapped file for which there is none is a signal."""

    def no_room(descriptor: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", no_room)
    recipe, *settings = ON_DISK[what]
    command = ["run", recipe, "--rounds", "4", *TINY, "--executor", "loop", "--out", tmp_path / "run"]
    told = refused(capsys, *command, *(word for setting in settings for word in ("--set", setting)))
    assert "bytes are needed on disk in" in told
    assert told.endswith("and there is no room: No space left on device.")


def test_usage_errors_have_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    from mixfed.cli import app

    for wrong in (["run"], ["run", "digits", "--executor", "magic"], ["nonsense"], ["compare", "digits"]):
        with pytest.raises(SystemExit) as stop:
            app(wrong)
        assert stop.value.code == 2
    capsys.readouterr()
