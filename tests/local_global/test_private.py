"""The private store: tables of rows in memory and on disk, consistent with the newest two checkpoints."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixfed.core.algorithm import Private
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.private import PrivateStore
from mixfed.core.tree import leaves
from mixfed.errors import InputError

START: Private = {"local": {"w": torch.tensor([1.0, 2.0, 3.0]), "n": torch.tensor(7)}}


def private(value: float) -> Private:
    return {"local": {"w": torch.full((3,), float(value)), "n": torch.tensor(int(value))}}


def store(folder: Path | None = None) -> PrivateStore:
    return PrivateStore(lambda: START, folder)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_cohort_is_gathered_in_one_go(where: str, tmp_path: Path) -> None:
    kept = store(tmp_path if where == "disk" else None)
    kept.put("clients", 5, private(50))
    kept.put_all("clients", [3, 900], {"local": {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor([1, 2])}})
    found = kept.gather("clients", [900, 4, 5, 3])["local"]
    assert found["w"].tolist() == [[3, 4, 5], [1, 2, 3], [50, 50, 50], [0, 1, 2]]
    assert found["n"].tolist() == [2, 7, 50, 1]
    assert kept.seen("clients").tolist() == [3, 5, 900]
    assert [c for c, _ in kept.items("clients")] == [3, 5, 900]
    assert kept.lacking("clients", "local", np.array([3, 4])) == 1


def test_what_a_message_brings_is_for_those_who_lack_it() -> None:
    kept = PrivateStore(dict)
    assert kept.get("clients", 1) == {}
    kept.put("clients", 1, private(4))
    found = kept.gather("clients", [1, 2], START)["local"]
    assert found["n"].tolist() == [4, 7]


def test_all_precisions(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        kept = PrivateStore(dict, folder)
        for dtype in (torch.bfloat16, torch.float64, torch.bool, torch.int8):
            x = {str(dtype): {"a": torch.tensor([1, 0, 1], dtype=dtype), "b": torch.tensor(1, dtype=dtype)}}
            kept.put("clients", 2, x)
        for dtype in (torch.bfloat16, torch.float64, torch.bool, torch.int8):
            found = dict(kept.items("clients"))[2][str(dtype)]
            assert found["a"].dtype == dtype
            assert found["a"].tolist() == [1, 0, 1]
            assert found["b"].shape == ()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.just("save"), st.just("die"), st.tuples(st.integers(0, 9), st.integers(0, 99))), max_size=25)
)
def test_any_death_finds_the_clients_as_the_checkpoint_knew_them(
    tmp_path_factory: pytest.TempPathFactory, actions: list[object]
) -> None:
    """A plain dictionary beside the store; a death goes back to the newest checkpoint or, damaged, the one before."""
    folder = tmp_path_factory.mktemp("private")
    checkpoints = Checkpoints(folder / "checkpoints")
    kept, truth = store(folder / "private"), {}
    saved: list[dict[int, int]] = []
    for action in actions:
        if action == "save":
            checkpoints.save({"private": kept.tree(), "round": len(saved)})
            saved.append(dict(truth))
        elif action == "die" and saved:
            for back in (1, 2):
                if back > len(saved):
                    continue
                files = checkpoints.files()
                again = store(folder / "private")
                again.restore(checkpoints.read(files[-back])["private"])
                assert {c: int(p["local"]["n"]) for c, p in again.items("clients")} == saved[-back]
            kept = store(folder / "private")
            kept.restore(checkpoints.load()["private"])  # type: ignore[index]
            truth = dict(saved[-1])
        elif isinstance(action, tuple):
            client, value = action
            kept.put("clients", client, private(value))
            truth[client] = value
    assert {c: int(p["local"]["n"]) for c, p in kept.items("clients")} == truth


def test_the_checkpoint_of_a_store_on_disk_is_small(tmp_path: Path) -> None:
    big = {"local": {"w": torch.zeros(100_000)}}
    kept = PrivateStore(lambda: big, tmp_path)
    for client in range(5):
        kept.put("clients", client, big)
    saved = kept.tree()
    assert sum(x.numel() for x in leaves(saved)) < 100
    again = PrivateStore(lambda: big, tmp_path / "elsewhere")
    with pytest.raises(InputError, match="not where the run left them"):
        again.restore(saved)


def anonymous_megabytes() -> float:
    """This process's own memory; pages of mapped files do not count, the system takes them back when it likes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_memory_is_flat_for_100_000_clients_seen(tmp_path: Path) -> None:
    """100,000 clients with 4 kB each are 400 MB; the process grows by a small part of that."""
    start = {"local": {"w": torch.zeros(1000)}}
    kept = PrivateStore(lambda: start, tmp_path)

    def ask(first: int, last: int) -> None:
        for client in range(first, last, 1000):
            cohort = np.arange(client, client + 1000)
            found = kept.gather("clients", cohort)["local"]["w"]
            kept.put_all("clients", cohort, {"local": {"w": found + torch.from_numpy(cohort)[:, None]}})

    ask(0, 2000)
    before = anonymous_megabytes()
    ask(2000, 100_000)
    assert anonymous_megabytes() - before < 30
    assert len(kept.seen("clients")) == 100_000
    for client in (0, 1999, 54_321, 99_999):
        assert kept.get("clients", client)["local"]["w"][::500].tolist() == [client, client]
    assert len(kept.tree()["clients"]["local"]["rows"]) == 100_000
