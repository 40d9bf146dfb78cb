"""Checkpoints: whole or not there, and the tree that comes back is the tree that was saved."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mixfed.algorithms.baselines import local
from mixfed.algorithms.fedavg import fedadam
from mixfed.core import tree
from mixfed.core.algorithm import Algorithm
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.files import write_atomically
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import adam
from mixfed.core.train import LocalTrainer
from mixfed.errors import InputError
from tests.core.helpers import assert_equal, clients, train

NESTED = {
    "round": 3,
    "state": {
        "params": {"layer.weight": torch.randn(2, 3), "layer.bias": torch.randn(3).bfloat16()},
        "server": {},
        "counts": {"a": torch.tensor([1, 2, 3]), "flag": torch.tensor([True, False]), "scalar": torch.tensor(2.5)},
        "double": torch.randn(2, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    },
    "history": [{"round": 1, "loss": 0.1 + 0.2, "bad": float("inf")}],
    "seconds": 1e-17,
    "nothing": None,
    "private": {"clients": {"12": {"buffers": {"m": torch.ones(2)}}}},
}


def assert_same_tree(a: object, b: object) -> None:
    if isinstance(a, dict):
        assert isinstance(b, dict)
        assert set(a) == set(b)
        for name in a:
            assert_same_tree(a[name], b[name])
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    else:
        assert type(a) is type(b)
        assert a == b


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(NESTED)
    assert_same_tree(Checkpoints(tmp_path).load(), NESTED)


leaf = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.none(), st.booleans(), st.just({}))
names = st.text("abc.", min_size=1, max_size=3)


@given(st.dictionaries(names, st.recursive(leaf, lambda t: st.dictionaries(names, t, max_size=3), max_leaves=8)))
def test_flatten_and_back(nested: dict) -> None:
    assert tree.unflatten(tree.flatten(nested)) == nested


def test_tensors_may_share_memory_and_layout(tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    images = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    contents = {"round": 1, "a": x, "same": x, "row": x[1], "part": x[1:], "turned": x.T, "images": images}
    Checkpoints(tmp_path).save(contents)
    assert_same_tree(Checkpoints(tmp_path).load(), contents)


def numbered(round: int) -> dict:
    return {"round": round, "x": torch.full((100,), float(round))}


def test_the_newest_and_the_one_before_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() is None
    for round in (1, 2, 9, 10):
        checkpoints.save(numbered(round))
    assert checkpoints.load()["round"] == 10
    assert len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("kept", [0, 1, 7, 60, 200, -1])
def test_a_torn_checkpoint_is_passed_over(kept: int, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(numbered(1))
    checkpoints.save(numbered(2))
    newest = sorted(tmp_path.iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:kept])
    assert_same_tree(checkpoints.load(), numbered(1))
    checkpoints.save(numbered(2))  # and the resumed run writes it again
    assert_same_tree(checkpoints.load(), numbered(2))


def test_foreign_files_are_passed_over(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(numbered(1))
    save_file({"x": torch.ones(1)}, tmp_path / "round-00000002.safetensors")  # whole, but no checkpoint of ours
    (tmp_path / ".round-00000003.safetensors.partial").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoints.load()["round"] == 1


def test_nothing_readable_is_told_instead_of_starting_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(numbered(1))
    next(tmp_path.iterdir()).write_bytes(b"")
    with pytest.raises(InputError, match=r"No checkpoint in .* can be read"):
        checkpoints.load()


def test_what_is_no_ordinary_file_stays_what_it_is(tmp_path: Path) -> None:
    """A pipe or a device is written into, and not replaced by a file of its name."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, b"to the ", b"reader")
    assert os.read(reader, 100) == b"to the reader"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match=r"Cannot write .*file: No space left on device\."):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_two_that_write_one_file_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes the same file while this one has not put its own in place."""
    path, fsync = tmp_path / "file", os.fsync

    def meanwhile(descriptor: int) -> None:
        monkeypatch.setattr("os.fsync", fsync)
        write_atomically(path, b"another's, which is longer")
        assert path.read_bytes() == b"another's, which is longer"
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", meanwhile)
    write_atomically(path, b"mine")
    assert path.read_bytes() == b"mine"
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(InputError, match="Cannot write"):
        Checkpoints(tmp_path / "taken" / "checkpoints").save(numbered(1))
    with pytest.raises(InputError, match="Cannot write"):
        Checkpoints(tmp_path / "taken").save(numbered(1))
    with pytest.raises(InputError):
        Checkpoints(tmp_path, every=0)


def private_model(policy: str = "private") -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), cross_entropy, buffers=policy)


ALGORITHMS = {
    "private buffers, FedAdam": lambda: fedadam(LocalTrainer(private_model(), adam(0.05), Batching(4, epochs=1))),
    "models of their own": lambda: local(LocalTrainer(private_model(), adam(0.05), Batching(4, epochs=1))),
}


@pytest.mark.parametrize("executor", ["loop", "vmap"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_resumed_at_any_round_is_bit_identical(name: str, executor: str, tmp_path: Path) -> None:
    """Six rounds with three of six clients each, so that some private parts are old when the run is resumed."""
    data = clients([4, 8, 12, 4, 8, 4])

    def go(rounds: int, folder: str | None = None, **options: object) -> dict[str, torch.Tensor]:
        checkpoints = Checkpoints(tmp_path / folder, every=1) if folder else None
        algorithm: Algorithm = ALGORITHMS[name]()
        result = train(algorithm, data, executor, rounds, cohort=3, threads=2, checkpoints=checkpoints, **options)
        private = {str(client): parts for client, parts in result.privates.items("clients")}
        return dict(tree.flatten({"params": result.params, "private": private}))

    straight = go(6)
    for stop in (1, 4, 5):
        go(stop, f"{stop}")
        assert_equal(go(6, f"{stop}", resume=True), straight)


def test_numbers_of_any_kind_in_metrics(tmp_path: Path) -> None:
    """A user's own evaluation may return NumPy's or torch's numbers."""
    result = train(
        ALGORITHMS["models of their own"](),
        clients([4, 4]),
        checkpoints=Checkpoints(tmp_path, every=1),
        evaluate=lambda params, privates: {"a": torch.tensor(0.5), "b": torch.tensor(2.0).numpy()},
    )
    assert result.metrics == {"a": 0.5, "b": 2.0}
    assert Checkpoints(tmp_path).load()["history"] == result.history


def test_a_stop_saves_and_tells(tmp_path: Path) -> None:
    rounds: list[int] = []
    result = train(
        ALGORITHMS["models of their own"](),
        clients([4, 4]),
        rounds=10,
        checkpoints=Checkpoints(tmp_path, every=100),
        callbacks=[lambda record: rounds.append(record.round)],
        should_stop=lambda: len(rounds) >= 2,
    )
    assert not result.finished
    assert result.rounds == 2 == Checkpoints(tmp_path).load()["round"]
