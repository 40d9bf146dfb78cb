"""Checkpoints that were damaged, belong to another run or grew long: found, refused, or of the same cost."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mixfed.algorithms.baselines import local
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.private import PrivateStore
from mixfed.core.storage import room
from mixfed.core.train import LocalTrainer
from mixfed.data._disk import reserve
from mixfed.errors import InputError
from tests.core.helpers import assert_equal, averaging, clients, train


def contents(round: int) -> dict:
    history = [{"round": r, "loss": 1 / r} for r in range(1, round + 1)]
    return {"round": round, "state": {"b": torch.full((3,), float(round)), "a": {}}, "history": history}


def flip(file: Path, bit: int) -> None:
    found = bytearray(file.read_bytes())
    found[bit // 8] ^= 1 << bit % 8
    file.write_bytes(found)


def test_every_single_flipped_bit_is_found(tmp_path: Path) -> None:
    """In the length, the header and the tensors; the run goes on from the checkpoint before, and says so."""
    Checkpoints(tmp_path).save(contents(1))
    told: list[str] = []
    checkpoints = Checkpoints(tmp_path, say=told.append)
    checkpoints.load()
    checkpoints.save(contents(2))
    newest = checkpoints.files()[-1]
    bits = 8 * newest.stat().st_size
    for bit in [*range(64), *range(64, bits, 97)]:
        flip(newest, bit)
        assert checkpoints.load()["round"] == 1, bit
        flip(newest, bit)
    assert checkpoints.load()["round"] == 2
    assert told == [f"{newest} is damaged, so the run goes on from the checkpoint before, round-00000001.safetensors."]


def test_damage_is_logged_where_nobody_listens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(contents(1))
    checkpoints.save(contents(2))
    flip(checkpoints.files()[-1], 800)
    with caplog.at_level(logging.WARNING, "mixfed"):
        assert checkpoints.load()["round"] == 1
    assert "is damaged" in caplog.text


def test_a_damaged_history_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for round in (1, 2):
        checkpoints.save(contents(round))
    (last,) = [file for file in tmp_path.glob("log-*") if "2" in file.name]
    flip(last, 8 * (last.stat().st_size - 3))
    assert checkpoints.load()["history"] == [{"round": 1, "loss": 1.0}]
    for file in tmp_path.glob("log-*"):
        file.unlink()
    with pytest.raises(InputError, match=r"No checkpoint in .* can be read"):
        checkpoints.load()


def test_the_checkpoint_of_another_run_or_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpoints(tmp_path, identity="one").save(contents(1))
    assert Checkpoints(tmp_path, identity="one").load()["round"] == 1
    with pytest.raises(InputError, match="a checkpoint of another run"):
        Checkpoints(tmp_path, identity="two").load()
    monkeypatch.setattr("mixfed.core.checkpoint.version", lambda name: "99.0")
    with pytest.raises(InputError, match=r"written by mixfed .* and this is mixfed 99"):
        Checkpoints(tmp_path, identity="one").load()


def test_the_order_of_names_comes_back(tmp_path: Path) -> None:
    tree = {
        "z": {"b": torch.ones(1), "nothing": {}, "a": torch.ones(1), "number": 3, "A": {"y": 1, "x": torch.ones(1)}},
        "history": [{"round": 1, "b": 1.0, "a": 2.0}],
        "empty": {},
        "round": 1,
        "a": torch.ones(1),
    }

    def order(node: object) -> object:
        return [(name, order(x)) for name, x in node.items()] if isinstance(node, dict) else None

    Checkpoints(tmp_path).save(tree)
    loaded = Checkpoints(tmp_path).load()
    assert order(loaded) == order(tree)
    assert list(loaded["history"][0]) == ["round", "b", "a"]


def test_a_checkpoint_costs_the_same_after_many_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that a checkpoint writes after 10 and after 2,000 rounds with ten evaluations in between."""
    written = 0
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        nonlocal written
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        written += path.stat().st_size if path.suffix == ".partial" else 0
        fsync(descriptor)

    checkpoints, history, diagnostics = Checkpoints(tmp_path), [], []
    cost = {}
    monkeypatch.setattr("os.fsync", counted)
    for round in range(1, 2001):
        history.append({"round": round, "loss": 1 / round})
        diagnostics.append({"round": round, "norm": 2 / round})
        if round in (10, 20, 1990, 2000):
            written = 0
            x = torch.ones(10)
            checkpoints.save({"round": round, "history": history, "diagnostics": diagnostics, "x": x})
            cost[round] = written
    assert cost[2000] <= cost[20] + 20
    monkeypatch.undo()
    loaded = Checkpoints(tmp_path).load()
    assert (loaded["history"], loaded["diagnostics"]) == (history, diagnostics)
    flip(checkpoints.files()[-1], 800)
    assert len(Checkpoints(tmp_path).load()["history"]) == 1990


def test_lists_that_are_not_those_of_before_are_written_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    history = [{"round": 1, "loss": 1.0}, {"round": 2, "loss": 2.0}]
    checkpoints.save({"round": 2, "history": history})
    del history[0]
    checkpoints.save({"round": 3, "history": history})
    assert Checkpoints(tmp_path).load()["history"] == history
    checkpoints.save({"round": 4, "history": [{"round": 4, "loss": 4.0}, *history]})
    assert Checkpoints(tmp_path).load()["history"][0]["round"] == 4
    assert len(list(tmp_path.iterdir())) == 4  # two checkpoints and their logs


def test_checkpoints_of_an_older_run_do_not_push_out_new_ones(tmp_path: Path) -> None:
    old = Checkpoints(tmp_path)
    for round in (8, 9):
        old.save(contents(round))
    Checkpoints(tmp_path).save(contents(1))
    assert Checkpoints(tmp_path).load()["round"] == 1


def own_models() -> Model:
    torch.manual_seed(0)
    return Model(torch.nn.Linear(3, 2), cross_entropy)


def test_more_rounds_have_the_history_of_a_run_of_that_length(tmp_path: Path) -> None:
    data, options = clients([4, 8]), {"every": 3, "evaluate": lambda params, privates: {"x": params["bias"].sum()}}
    train(averaging(own_models()), data, rounds=4, checkpoints=Checkpoints(tmp_path, every=1), **options)
    longer = {"rounds": 8, "checkpoints": Checkpoints(tmp_path, every=1), "resume": True}
    resumed = train(averaging(own_models()), data, **longer, **options)
    straight = train(averaging(own_models()), data, rounds=8, **options)
    assert [entry["round"] for entry in resumed.history] == [3, 6, 8]
    assert resumed.history == straight.history == Checkpoints(tmp_path).load()["history"]
    again = train(averaging(own_models()), data, **longer, **options)  # finished: nothing is left to do
    assert again.history == straight.history


def test_another_seed_or_fewer_rounds_are_refused(tmp_path: Path) -> None:
    data = clients([4, 8])
    train(averaging(own_models()), data, rounds=4, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(InputError, match="has the seed 5, so it cannot go on with 6"):
        train(averaging(own_models()), data, rounds=6, seed=6, checkpoints=Checkpoints(tmp_path), resume=True)
    with pytest.raises(InputError, match="has done 4 rounds, so it cannot end at 3"):
        train(averaging(own_models()), data, rounds=3, checkpoints=Checkpoints(tmp_path), resume=True)


@pytest.mark.parametrize("damage", ["zeroed", "one bit", "cut", "of another run"])
def test_private_rows_that_changed_are_refused(damage: str, tmp_path: Path) -> None:
    data = clients([4, 8, 4, 4])

    def go(rounds: int, folder: str = "run", **options: object) -> dict[str, torch.Tensor]:
        algorithm = local(LocalTrainer(own_models(), sgd(0.1), Batching(4, epochs=1)))
        checkpoints = Checkpoints(tmp_path / folder, every=1)
        private = {"private_folder": tmp_path / folder / "private"}
        result = train(algorithm, data, rounds=rounds, cohort=3, checkpoints=checkpoints, **private, **options)
        return {f"{c} {n}": x for c, p in result.privates.items("clients") for n, x in p["params"].items()}

    go(3)
    (file,) = (tmp_path / "run" / "private").iterdir()
    whole = file.read_bytes()
    if damage == "zeroed":
        file.write_bytes(bytes(len(whole)))
    elif damage == "one bit":
        row = int(Checkpoints(tmp_path / "run").load()["backend"]["private"]["clients"]["params"]["rows"][-1])
        flip(file, 8 * 48 * row + 5)  # a row has 6 + 2 numbers of 4 bytes, each leaf at a multiple of 16 bytes
    elif damage == "cut":
        file.write_bytes(whole[:50])
    else:
        go(3, "other", seed=77)
        file.write_bytes((tmp_path / "other" / "private" / file.name).read_bytes())
    with pytest.raises(InputError, match="are not as the run left them"):
        go(5, resume=True)
    file.write_bytes(whole)
    assert_equal(go(5, resume=True), go(5, "straight"))


def no_room(descriptor: int, start: int, length: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_a_sentence_with_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.posix_fallocate", no_room)
    with pytest.raises(InputError, match=r"^4,000 bytes are needed on disk in .*: No space left on device\.$"):
        room((10, 100), torch.float32, torch.device("cpu"), "disk")
    store = PrivateStore(dict, tmp_path)
    with pytest.raises(InputError, match=rf"bytes are needed on disk in {tmp_path}, and there is no room"):
        store.put("clients", 1, {"local": {"w": torch.ones(1000)}})


def test_room_is_reserved_where_the_system_cannot_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then zeros are written; a file that was there keeps what it has. Blocks are of 512 bytes."""
    monkeypatch.delattr("os.posix_fallocate")
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    with open(path, "r+b") as file:
        reserve(file, 10, 3_000_000, tmp_path)
    assert path.read_bytes() == b"x" * 10 + bytes(2_999_990)
    assert path.stat().st_blocks * 512 >= 3_000_000


def test_rooms_are_on_the_disk_before_they_are_used(tmp_path: Path) -> None:
    store = PrivateStore(dict, tmp_path)
    store.put("clients", 1, {"local": {"w": torch.ones(1000)}})
    (file,) = tmp_path.iterdir()
    assert file.stat().st_blocks * 512 >= file.stat().st_size > 4000


def test_private_parts_without_leaves_are_resumed(tmp_path: Path) -> None:
    store = PrivateStore(dict, tmp_path / "private")
    store.put_all("clients", [1, 2], {"local": {}})
    Checkpoints(tmp_path).save({"round": 1, "private": store.tree()})
    again = PrivateStore(dict, tmp_path / "private")
    again.restore(Checkpoints(tmp_path).load()["private"])
    assert np.array_equal(again.seen("clients"), [1, 2])


def test_a_link_in_the_place_of_rows_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"precious")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "clients.local.rows").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match="Cannot keep private parts"):
        PrivateStore(dict, tmp_path / "private").put("clients", 1, {"local": {"w": torch.ones(9)}})
    assert (tmp_path / "mine").read_bytes() == b"precious"


def test_the_header_is_json_that_anyone_can_read(tmp_path: Path) -> None:
    """A checkpoint is a plain safetensors file still."""
    from safetensors import safe_open

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(contents(1))
    with safe_open(str(checkpoints.files()[0]), framework="pt") as stored:
        assert json.loads(stored.metadata()["rest"])["round"] == 1
        assert torch.equal(stored.get_tensor("state/b"), torch.ones(3))
