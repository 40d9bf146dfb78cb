"""Dealing by another field than the labels that are learnt, and labels that are wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mixfed.data.scenario import Scenario, with_label_noise
from mixfed.data.sources import load_source
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.build import build
from mixfed.experiments.scenario import build_scenario


def write_hundred(folder: Path) -> None:
    """400 + 40 images of eight classes in four groups."""
    draw, parts = np.random.default_rng(0), {}
    for part, count in (("train", 400), ("test", 40)):
        fine = np.arange(count) % 8
        parts |= {f"x_{part}": draw.integers(0, 256, (count, 32, 32, 3), np.uint8)}
        parts |= {f"fine_{part}": fine, f"coarse_{part}": fine // 2}
    np.savez(folder / "cifar100_subset.npz", **parts)


def scenario(name: str, folder: Path, *settings: str) -> Scenario:
    return build_scenario(toml.resolve(toml.override(toml.load(name), [f"data.folder='{folder}'", *settings])))


def test_groups_are_learnt_and_classes_are_dealt(tmp_path: Path) -> None:
    write_hundred(tmp_path)
    source = load_source("cifar100", tmp_path, labels="coarse")
    assert source.classes == 20
    assert np.array_equal(source.train["y"], source.train["fine"] // 2)
    settings = ["data.partition.kind=shards", "data.partition.clients=8", "data.partition.classes_per_client=1"]
    dealt = scenario("feddle-cifar100-quick", tmp_path, *settings, "data.central.examples=10").clients
    held = [np.unique(dealt.arrays["fine"][a:b]) for a, b in zip(dealt.offsets[:-1], dealt.offsets[1:], strict=True)]
    assert sorted(int(fine[0]) for fine in held) == list(range(8))
    assert all(len(fine) == 1 for fine in held)


def test_the_field_to_deal_by_must_be_there(tmp_path: Path) -> None:
    write_hundred(tmp_path)
    with pytest.raises(InputError, match=r"no labels 'colour' \(data.partition.by\); they have y, fine"):
        scenario("feddle-cifar100-quick", tmp_path, "data.partition.by=colour", "data.central.examples=10")


def test_the_quick_recipe_runs(tmp_path: Path) -> None:
    write_hundred(tmp_path)
    small = ["data.partition.clients=10", "data.central.examples=10", "rounds=3", "cohort=3", "central.steps=2"]
    small += ["evaluate.every=1", "schedule.sd=1.0", "data.partition.alpha=10.0", "simulator.executor=loop"]
    table = toml.override(toml.load("feddle-cifar100-quick"), [f"data.folder='{tmp_path}'", *small])
    result = build(toml.resolve(table)).run()
    assert np.isfinite(result.metrics["loss"])


def test_a_share_of_the_labels_is_random() -> None:
    labels = np.zeros(10_000, np.int64)
    clients = FederatedData.from_arrays({"x": np.arange(10_000.0), "y": labels}, np.arange(10_000) % 10)
    noisy = with_label_noise(clients, 0.2, 5, seed=3)
    changed = noisy.arrays["y"] != clients.arrays["y"]
    # Of the 2,000 drawn one in five draws its own label again: 1,600 change, give or take √(2000·0.2·0.8) = 18.
    assert 1600 - 5 * 18 < changed.sum() < 1600 + 5 * 18
    assert set(noisy.arrays["y"]) == {0, 1, 2, 3, 4}
    assert np.array_equal(noisy.arrays["x"], clients.arrays["x"])
    assert np.array_equal(noisy.arrays["y"], with_label_noise(clients, 0.2, 5, seed=3).arrays["y"])
    assert not np.array_equal(noisy.arrays["y"], with_label_noise(clients, 0.2, 5, seed=4).arrays["y"])
    assert not clients.arrays["y"].any()


def test_noise_is_on_clients_only_and_comes_after_the_dealing() -> None:
    def dealt(noise: float) -> Scenario:
        settings = [f"data.label_noise={noise}", "data.own_test=0.2", "data.validation=0.1"]
        return build_scenario(toml.resolve(toml.override(toml.load("digits"), settings)))

    clean, noisy = dealt(0.0), dealt(0.5)
    assert np.array_equal(clean.clients.arrays["x"], noisy.clients.arrays["x"])
    assert (clean.clients.arrays["y"] != noisy.clients.arrays["y"]).mean() > 0.3
    for one, other in ((clean.test, noisy.test), (clean.validation, noisy.validation), (clean.central, noisy.central)):
        assert one is not None
        assert other is not None
        assert np.array_equal(one.arrays["y"], other.arrays["y"])
    assert np.array_equal(clean.own["test"].arrays["y"], noisy.own["test"].arrays["y"])


def test_noise_that_is_no_share_is_refused() -> None:
    with pytest.raises(InputError, match=r"'data.label_noise' must be a share from 0 to 1, not 1.5"):
        build_scenario(toml.resolve(toml.override(toml.load("digits"), ["data.label_noise=1.5"])))


def test_noise_on_targets_that_are_no_classes_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "prices.csv"
    table.write_text("who,size,price\n" + "".join(f"{i % 4},{i},{i / 7}\n" for i in range(40)), encoding="utf-8")
    recipe = {
        "data": {"source": "files", "clients": str(table), "client": "who", "fields": {"x": ["size"], "y": "price"}},
        "model": {"name": "mlp", "criterion": "squared_error"},
    }
    recipe["data"] |= {"labels": "standard", "test_share": 0.2, "label_noise": 0.2}
    with pytest.raises(InputError, match=r"data.label_noise needs examples that have classes, and these have none"):
        build_scenario(toml.resolve(recipe))
