"""Files that are said to be weights and are not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mixfed.errors import InputError
from mixfed.models.weights import load_weights

OTHERS = [b"", b".", b"}.", b"Vx\n", b"\x80\x02", b"PK\x03\x04", b"Q", b"a text\n", b"0" * 99]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


@pytest.mark.parametrize("content", OTHERS)
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "w.txt"])
def test_other_files(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=r"is not a file of weights|does not hold weights by name|of another network"):
        load_weights(network(), tmp_path / name)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("suffix", ["pth", "safetensors", "legacy"])
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    """Whatever a few changed bytes lead to: weights, or a sentence."""
    file, draw, state = tmp_path / f"w.{suffix}", random.Random(0), network().state_dict()
    if suffix == "safetensors":
        save_file(state, file)
    else:
        torch.save(state, file, _use_new_zipfile_serialization=suffix == "pth")
    whole, refused = file.read_bytes(), 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 4, 40])):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        file.write_bytes(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])])
        try:
            load_weights(network(), file)
        except InputError:
            refused += 1
    assert refused > 100


def test_names_that_are_no_text(tmp_path: Path) -> None:
    torch.save({1: torch.zeros(1), "two": torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(InputError, match="does not hold weights by name"):
        load_weights(network(), tmp_path / "w.pth")
