"""The picture of who holds what: drawn for any labels, and its counts are those of the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mixfed.data import CentralData, FederatedData, plot_holdings
from mixfed.errors import InputError
from mixfed.experiments.ownership import _Bins

random = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("clients", "labels", "central"), [(1, 1, True), (7, 2, False), (7, 300, True), (1000, 10, True)]
)
def test_a_picture_is_drawn(tmp_path: Path, clients: int, labels: int, central: bool) -> None:
    owners = np.concatenate([np.arange(clients), random.integers(0, clients, 2000)])
    data = FederatedData.from_arrays({"y": random.integers(0, labels, len(owners))}, owners)
    server = CentralData({"y": random.integers(0, labels, 50)}) if central else None
    plot_holdings(data, tmp_path / "new" / "holdings.png", server, names=("none", "one"))
    with Image.open(tmp_path / "new" / "holdings.png") as image:
        assert image.size[0] > 1000
        assert len(np.unique(np.asarray(image.convert("L")))) > 10


def test_empty_clients_and_fractions_can_be_drawn(tmp_path: Path) -> None:
    data = FederatedData({"score": random.normal(size=100)}, [0, 40, 40, 100])
    plot_holdings(data, tmp_path / "holdings.svg", field="score")
    assert (tmp_path / "holdings.svg").read_text().count("path") > 20


def test_bins_count_every_example() -> None:
    few, many = random.integers(-2, 3, 100), random.integers(0, 1000, 5000)
    for labels in (few, many):
        bins = _Bins([labels])
        assert bins.count(labels).sum() == len(labels)
        assert len(bins.words(None)) == len(bins.count(labels)) <= 20
    assert list(_Bins([few]).count(few)) == [np.sum(few == value) for value in range(-2, 3)]
    assert _Bins([np.array([0, 1])]).words(("no", "yes")) == ["no", "yes"]
    assert _Bins([np.arange(100)]).words(None)[:2] == ["0 – 4", "5 – 9"]


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    data = FederatedData({"x": np.zeros((4, 2)), "y": np.arange(4)}, [0, 2, 4])
    with pytest.raises(InputError, match="no field 'label' to draw; there are x, y"):
        plot_holdings(data, tmp_path / "a.png", field="label")
    with pytest.raises(InputError, match="single number per example"):
        plot_holdings(data, tmp_path / "a.png", field="x")
    with pytest.raises(InputError, match="no client to draw"):
        plot_holdings(data, tmp_path / "a.png", max_clients=0)
    with pytest.raises(InputError, match="no example to draw"):
        plot_holdings(FederatedData({"y": np.array([], int)}, [0, 0]), tmp_path / "a.png")
