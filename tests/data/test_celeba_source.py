"""CelebA from a tiny Hugging Face dataset of the same schema: sizes, labels, celebrities, and the recipe's clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk

from mixfed.data import central_from_huggingface, load_source
from mixfed.errors import InputError
from mixfed.experiments.build import build
from mixfed.experiments.networks import build_model
from mixfed.experiments.toml import load, override, resolve
from tests.tiny_sources import write_celeba


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data")
    write_celeba(place)
    return place


def test_train_and_valid_are_trained_on_and_the_rare_are_left_out(folder: Path) -> None:
    source = load_source("celeba", folder)
    assert source.natural_clients is not None
    assert np.unique(source.natural_clients["train"]).tolist() == [*range(12), 20, 21, 22]
    assert np.unique(source.natural_clients["test"]).tolist() == [30, 31, 32]
    assert source.train["x"].shape == (15 * 6, 3, 28, 28)
    assert source.train["x"].dtype == np.uint8
    assert source.train.keys() == source.test.keys() == {"x", "y"}
    everyone = load_source("celeba", folder, min_images=1)
    assert len(everyone.train["y"]) == len(source.train["y"]) + 2


def test_the_label_is_the_attribute(folder: Path) -> None:
    source = load_source("celeba", folder)
    bright = source.train["x"].mean(axis=(1, 2, 3)) > 128
    assert np.array_equal(bright, source.train["y"] == 1)
    assert source.names["y"] == ("not Smiling", "Smiling")
    assert load_source("celeba", folder, attribute="Young").train["y"].all()
    with pytest.raises(InputError, match=r"has no field 'Smirking'; it has image, celeb_id, Male, Smiling, Young"):
        load_source("celeba", folder, attribute="Smirking")


def test_images_are_averaged_to_the_size(folder: Path) -> None:
    original = np.asarray(load_from_disk(folder / "celeba")["test"][0]["image"], np.float64)
    assert original.shape == (218, 178, 3)
    halved = central_from_huggingface(folder / "celeba", ["image"], split="test", size=(109, 89)).arrays["image"][0]
    means = original.reshape(109, 2, 89, 2, 3).mean(axis=(1, 3)).transpose(2, 0, 1)
    assert np.abs(halved - means).max() <= 1
    assert load_source("celeba", folder, size=1).test["x"].shape == (18, 3, 1, 1)
    with pytest.raises(InputError, match="at least 1, not 0"):
        load_source("celeba", folder, size=0)


def test_the_recipe_groups_three_celebrities_with_smiling_faces_only(folder: Path) -> None:
    given = override(load("smile-celeba"), [f"data.folder={folder}", "cohort=2", "rounds=1", "algorithm=parallel"])
    experiment = build(resolve(given))
    clients, central = experiment.clients, experiment.scenario.central
    assert len(clients) == 5
    assert (clients.sizes() == 9).all()
    assert (clients.arrays["y"] == 1).all()
    assert central is not None
    assert (central.arrays["y"] == 0).all()
    assert experiment.run().metrics.keys() >= {"loss", "accuracy", "auc"}
    model = build_model(experiment.recipe, experiment.scenario)
    assert sum(x.numel() for x in model.initial().values()) == 2352 * 64 + 64 + 64 + 1
