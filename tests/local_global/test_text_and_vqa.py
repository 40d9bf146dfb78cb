"""Text with a Bi-LSTM and questions about images, on tiny files in the formats of the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mixfed.core.checkpoint import Checkpoints
from mixfed.data import load_source
from mixfed.data.sources.chat_style import ENDINGS, without_ending
from mixfed.data.sources.chat_wiki import encode
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.build import build
from mixfed.experiments.recipe import Recipe
from mixfed.models.bilstm import BiLSTM
from mixfed.models.resnet import ResNet18
from mixfed.models.vqa import QuestionAnswering
from tests.tiny_sources import write_chat_wiki, write_vqa


def recipe(name: str, folder: Path, *settings: str) -> Recipe:
    return toml.resolve(toml.override(toml.load(name), [f"data.folder='{folder}'", *settings]))


def test_text_recipe(tmp_path: Path) -> None:
    write_chat_wiki(tmp_path)
    source = load_source("chat-style", tmp_path, min_messages=2, length=8)
    assert source.train["x"].shape[1] == 8
    assert len(source.train["y"]) + len(source.test["y"]) == 8 * 3
    small = ["data.min_messages=2", "data.users=0", "data.length=8", "data.own_test=0.4", "data.own_validation=0.0"]
    small += ["data.validation=0.0", "rounds=2", "cohort=2", "evaluate.every=1", "algorithms.lg_fedavg.warm_start=1"]
    result = build(recipe("lg-text-quick", tmp_path, *small, "data.partition.group=4")).run()
    assert set(result.metrics) == {"accuracy_local", "accuracy_new", "accuracy_averaged"}
    with pytest.raises(InputError, match="no user wrote 500 messages with a mark"):
        load_source("chat-style", tmp_path, min_messages=500)


@pytest.mark.parametrize(
    ("message", "text", "ending"),
    [
        ("try sudo apt", "try sudo apt", ""),
        ("it works. ", "it works", "full stop"),
        ("well...", "well", "full stop"),
        ("does it work?!?", "does it work", "question mark"),
        ("thanks!", "thanks", "exclamation mark"),
        ("it works! :-)", "it works", "smiley"),
        ("see http://x.org/", "see http://x.org/", ""),
        ("???", "", "question mark"),
        ("", "", ""),
    ],
)
def test_how_messages_end(message: str, text: str, ending: str) -> None:
    assert without_ending(message) == (text, ending)


def test_of_a_long_message_the_end_is_kept_without_its_mark(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "ubuntu_irc_by_user.csv").write_text("user,text\na,does it work?\na,!\na,no mark\na,ok.\n")
    source = load_source("chat-style", tmp_path, length=4, min_messages=1)
    x, y = (np.concatenate([source.train[n], source.test[n]]) for n in ("x", "y"))
    found = {(bytes(row), ENDINGS[ending]) for row, ending in zip(x, y, strict=True)}
    assert found == {(bytes(encode("work")), "question mark"), (bytes(encode("ok")) + bytes(2), "full stop")}


def test_padding_does_not_change_what_the_bilstm_averages() -> None:
    network = BiLSTM(5, width=4, dense=[4]).eval()
    assert network(torch.tensor([[3, 4, 0, 0]])).shape == (1, 5)
    assert torch.isfinite(network(torch.zeros(1, 4, dtype=torch.long))).all()


def test_vqa_recipe(tmp_path: Path) -> None:
    write_vqa(tmp_path)
    source = load_source("vqa", tmp_path, size=32)
    numbers = source.train["x"]
    assert numbers.shape == (12,)
    assert source.prepare is not None
    files = sorted((tmp_path / "vqa" / "train2014").iterdir())
    for _ in range(2):  # read from the files, then from what is kept of them
        images = source.prepare({"x": torch.from_numpy(numbers).reshape(3, 4)})["x"]
        assert images.shape == (3, 4, 3, 32, 32)
        with Image.open(files[6]) as seventh:
            wanted = np.asarray(seventh.convert("RGB").resize((32, 32))).transpose(2, 0, 1) / 255
        torch.testing.assert_close(images[1, 2], torch.from_numpy(wanted).float())
    assert source.names["question"] == ("", "unknown", "colour", "is", "the", "wall", "what")
    assert source.train["question"][0, :6].tolist() == [6, 2, 3, 4, 5, 0]
    assert set(source.names["y"]) == {"blue", "red"}
    # Not narrower: torch 2.13's CPU kernel of a strided 1×1 convolution from 4 to 8 channels crashes (channels last).
    small = ["data.size=64", "data.own_test=0.4", "data.own_validation=0.0", "data.partition.kind=iid"]
    small += ["data.partition.clients=2", "cohort=2", "rounds=2", "evaluate.every=1", "client.batch_size=4"]
    small += ["model.width=16", "model.embedding=6", "model.fused=8", "algorithms.lg_fedavg.warm_start=1"]
    result = build(recipe("lg-vqa", tmp_path, *small)).run(checkpoints=Checkpoints(tmp_path / "c"))
    assert set(result.metrics) == {"accuracy_local"}
    assert result.privates is not None
    local = result.privates.get("clients", 0)["local"]
    assert all(name.startswith(("image.", "question.")) for name in local)
    assert any("running_mean" in name for name in local)


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    write_vqa(tmp_path)
    gone = tmp_path / "vqa" / "train2014" / "COCO_train2014_000000000003.jpg"
    gone.unlink()
    with pytest.raises(InputError, match=r"000000000003\.jpg is missing"):
        load_source("vqa", tmp_path)


def test_the_encoders_have_the_right_sizes() -> None:
    assert sum(p.numel() for p in ResNet18(0).parameters()) == 11_176_512
    network = QuestionAnswering(1000)
    head = sum(p.numel() for p in network.head.parameters())
    assert head < 0.25 * sum(p.numel() for p in network.parameters())
