"""Dropout: every client and step has masks of its own, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.errors import InputError
from mixfed.models.draws import KeyedDraws
from tests.core.helpers import assert_close, assert_equal, averaging, clients, train

DATA = clients([3, 9, 5, 4, 7], (6,))


class Functional(nn.Module):
    """Dropout as a function: no layer tells that it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.relu(self.first(x)), 0.5, self.training))


def layers() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(24, 2)
    )


NETWORKS = {"layers": layers, "functional": Functional, "images": images}


def model(make: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(make(), cross_entropy)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_same_masks_whatever_runs_the_cohort(network: str) -> None:
    make = NETWORKS[network]
    torch.manual_seed(1)
    reference = train(averaging(model(make)), DATA, "loop").params
    torch.manual_seed(2)  # masks do not come from the global generator
    for executor, options in [("loop", {"threads": 3}), ("vmap", {"chunk": 2}), ("vmap", {"chunk": 9, "threads": 2})]:
        assert_close(train(averaging(model(make)), DATA, executor, **options).params, reference, 2e-6)
    torch.manual_seed(3)
    assert_equal(train(averaging(model(make)), DATA, "loop").params, reference)
    off = Model(make(), cross_entropy, forward=lambda m, b: m.eval()(b["x"]))
    torch.manual_seed(0)
    assert any(not torch.allclose(x, reference[n]) for n, x in train(averaging(off), DATA).params.items())


def dropped(
    key: int, p: float = 0.5, shape: tuple[int, ...] = (50, 40), drop: Callable[..., Tensor] = F.dropout
) -> Tensor:
    with KeyedDraws(torch.tensor(key)):
        return drop(torch.ones(shape), p, True)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_keep_rate_and_scale(p: float) -> None:
    """20,000 elements: within 5 standard deviations of 1 − p, and what is kept is scaled by 1/(1 − p)."""
    x = dropped(7, p, (200, 100))
    assert float((x > 0).float().mean()) == pytest.approx(1 - p, abs=5 * (p * (1 - p) / 20000) ** 0.5)
    assert x.unique().tolist() == pytest.approx([0, 1 / (1 - p)])


def test_everything_can_be_dropped() -> None:
    assert not dropped(7, 1.0).any()
    assert bool((dropped(7, 0.0) == 1).all())


def agreement(a: Tensor, b: Tensor) -> float:
    return float((a == b).float().mean())


def test_masks_differ_between_keys_and_draws() -> None:
    """Two independent masks at p = ½ agree on half of 2,000 elements, ± 5·0.011."""
    assert agreement(dropped(1), dropped(1)) == 1
    assert agreement(dropped(1), dropped(2)) == pytest.approx(0.5, abs=0.06)
    with KeyedDraws(torch.tensor(1)):
        first, second = F.dropout(torch.ones(50, 40)), F.dropout(torch.ones(50, 40))
    assert agreement(first, second) == pytest.approx(0.5, abs=0.06)


def test_clients_and_steps_have_masks_of_their_own() -> None:
    """Two rounds of two steps of three clients: twelve masks, no two the same (the ledger's own trials aside)."""
    seen: list[tuple[float, ...]] = []

    def forward(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if module.training and len(batch["x"]) > 3:
            seen.append(tuple(module[0](torch.ones(4, 30)).flatten().tolist()))
        return module(batch["x"])

    noted = Model(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2)), cross_entropy, forward=forward)
    train(averaging(noted, Batching(0, steps=2)), DATA.select([1, 2, 4]), rounds=2)
    assert len(set(seen)) == len(seen) == 12


@pytest.mark.parametrize(
    ("drop", "shape"), [(F.dropout1d, (6, 5, 7)), (F.dropout2d, (6, 5, 3, 4)), (F.dropout3d, (6, 5, 2, 3, 2))]
)
def test_channelwise(drop: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    x = dropped(3, 0.5, shape, drop).flatten(2)
    assert bool((x == x[:, :, :1]).all())
    assert {0.0, 2.0} == set(x[:, :, 0].flatten().tolist())


def test_evaluation_has_no_dropout() -> None:
    m, x = model(layers), torch.randn(4, 6)
    first, second = (m.outputs(m.initial(), {"x": x, "key": torch.tensor(k)}, training=False) for k in (1, 2))
    assert torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, layers().eval()(x).detach())


def test_masked_elements_have_no_gradient() -> None:
    x = torch.ones(50, requires_grad=True)
    with KeyedDraws(torch.tensor(1)):
        y = F.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


REFUSED = {
    "attention": lambda: nn.MultiheadAttention(4, 2, dropout=0.1),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, dropout=0.1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_per_client_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="per client"):
        Model(REFUSED[name](), cross_entropy)


@pytest.mark.parametrize("layer", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_is_refused(layer: type[nn.Module]) -> None:
    with pytest.raises(InputError, match="Alpha dropout"):
        train(averaging(Model(nn.Sequential(layer(0.5), nn.Linear(6, 2)), cross_entropy)), DATA)


def test_a_missing_key_is_told() -> None:
    m = model(layers)
    with pytest.raises(InputError, match="key"):
        m.loss(m.initial(), {"x": torch.randn(2, 6), "y": torch.tensor([0, 1])})
