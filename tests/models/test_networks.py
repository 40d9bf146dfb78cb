"""The networks of the papers: the shapes of their layers."""

from __future__ import annotations

import pytest
import torch

from mixfed.errors import InputError
from mixfed.models.networks import cnn


@pytest.mark.parametrize(
    ("pool_after", "side"),
    [(0, 11), (3, 11), (1, 9), (2, 10)],  # 28 − 2·3 = 22, halved; (28 − 2)/2 − 2·2 = 9; (28 − 2·2)/2 − 2 = 10
)
def test_where_the_pooling_comes(pool_after: int, side: int) -> None:
    network = cnn(1, 28, 10, widths=(2, 3, 4), dense=5, pool_after=pool_after)
    assert [tuple(p.shape) for p in network.parameters() if p.ndim == 2] == [(5, 4 * side**2), (10, 5)]
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(
    ("size", "pool_after", "told"), [(28, 3, "after one of the convolutions"), (5, 0, "too small"), (5, 1, "too small")]
)
def test_networks_that_cannot_be_are_refused(size: int, pool_after: int, told: str) -> None:
    with pytest.raises(InputError, match=told):
        cnn(1, size, 10, widths=(2, 2), pool_after=pool_after)
