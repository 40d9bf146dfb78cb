"""ViT with LoRA, on a tiny random network of the same classes: only adapters and head train and travel."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import mixfed as mf
from mixfed.core import tree
from mixfed.core.algorithm import Server
from mixfed.core.model import Model
from mixfed.errors import InputError
from mixfed.models.vit import ViT
from tests.core.helpers import averaging, clients, train

WIDTH, LAYERS, RANK, CLASSES = 8, 2, 4, 3
TRAVELS = LAYERS * 2 * 2 * RANK * WIDTH + CLASSES * (WIDTH + 1)
"""A and B (rank × width numbers each) for queries and values of every layer, and the head."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import ViTConfig, ViTModel

    place = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
    )
    ViTModel(config, add_pooling_layer=False).save_pretrained(place)
    return place


def network(folder: Path) -> ViT:
    torch.manual_seed(1)
    return ViT(CLASSES, str(folder), rank=RANK)


def test_it_starts_at_the_published_network(folder: Path) -> None:
    from transformers import ViTModel

    published = ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()
    vit = network(folder).eval()
    images = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        token = published((images - 0.5) / 0.5).last_hidden_state[:, 0]
        torch.testing.assert_close(vit(images), vit.head(token))
    scaling = {m.scaling["default"] for m in vit.modules() if hasattr(m, "scaling") and isinstance(m.scaling, dict)}
    assert scaling == {8 / 4}


def test_only_adapters_and_head_train_and_travel(folder: Path) -> None:
    vit = network(folder)
    before = {n: x.clone() for n, x in vit.state_dict().items()}
    model = Model(vit, mf.cross_entropy)
    algorithm = averaging(model)
    state = algorithm.init(model.initial())
    (message,) = algorithm.broadcast(state, Server(0, 0, model))[0].values()
    sent = tree.flatten(message.payload)
    assert all("lora_" in name or "head." in name for name in sent)
    assert sum(x.numel() for x in sent.values()) == TRAVELS
    result = train(algorithm, clients([4, 6], (1, 8, 8), CLASSES), "loop", rounds=2)
    assert result.ledger["bytes_down"] == result.ledger["bytes_up"] == 4 * TRAVELS * 2 * 2
    assert set(result.params) == {n for n in before if "lora_" in n or n.startswith("head.")}
    assert not any(torch.equal(x, before[n]) for n, x in result.params.items() if "lora_B" in n)
    for name, x in model.module().state_dict().items():
        if name not in result.params:
            assert torch.equal(x, before[name]), name
    assert all(torch.equal(x, before[n]) for n, x in vit.state_dict().items())


def test_a_folder_without_a_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        ViT(CLASSES, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(InputError, match="holds no vision transformer that can be loaded"):
        ViT(CLASSES, str(tmp_path))


def test_a_folder_of_another_network_is_refused(folder: Path, tmp_path: Path) -> None:
    """transformers itself only warns, and starts from random weights."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "vit"', '"model_type": "bert"'))
    with pytest.raises(InputError, match=r"has no config\.json of a vision transformer"):
        ViT(CLASSES, str(tmp_path))
    config.write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": LAYERS + 1}))
    with pytest.raises(InputError, match=r"are of another network: there is no .*2"):
        ViT(CLASSES, str(tmp_path))


@pytest.mark.parametrize("told", ["", "[", "[]", "7", '{"model_type": "vit", "hidden_size": "wide"}', "\udcff"])
def test_settings_that_are_none_are_refused(folder: Path, tmp_path: Path, told: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_bytes(told.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=r"config\.json|can be loaded"):
        ViT(CLASSES, str(tmp_path))


@pytest.mark.parametrize("told", ["[", "[]", '{"image_mean": 3}', '{"image_std": [1, 1]}', '{"image_std": [0, 0, 0]}'])
def test_colours_that_are_none_are_refused(folder: Path, tmp_path: Path, told: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").write_text(told)
    with pytest.raises(InputError, match=r"preprocessor_config\.json"):
        ViT(CLASSES, str(tmp_path))


def test_damaged_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="can be loaded"):
        ViT(CLASSES, str(tmp_path))


@pytest.mark.parametrize(("rank", "scale"), [(0, 8.0), (4, float("nan"))])
def test_adapters_that_cannot_be_are_refused(folder: Path, rank: int, scale: float) -> None:
    with pytest.raises(InputError, match=r"'(rank|scale)' of ViT must be"):
        ViT(CLASSES, str(folder), rank=rank, scale=scale)
