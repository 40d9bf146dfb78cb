"""Images change at random in training, alike under every executor, and not in evaluation."""

from __future__ import annotations

import pytest
import torch

from mixfed.algorithms.fedavg import fedavg
from mixfed.backends.run import run
from mixfed.backends.simulator.engine import Simulator
from mixfed.core.batches import Batching
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.train import LocalTrainer
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.experiments.networks import build_network
from mixfed.experiments.request import Request
from mixfed.models.augment import augment, flip, shift


def test_half_of_the_images_are_mirrored() -> None:
    torch.manual_seed(0)
    images = torch.rand(400, 1, 2, 3)
    changed = flip(images)
    mirrored = (changed == images.flip(-1)).flatten(1).all(1)
    assert (mirrored | (changed == images).flatten(1).all(1)).all()
    assert 150 < int(mirrored.sum()) < 250


def test_images_are_moved_by_up_to_so_many_pixels() -> None:
    torch.manual_seed(0)
    images = torch.zeros(500, 2, 5, 5)
    images[:, :, 2, 2] = 1.0
    changed = shift(images, 2)
    assert changed.shape == images.shape
    assert (changed.sum((-2, -1)) == 1).all()  # the pixel in the middle is still there
    assert torch.equal(changed[:, 0], changed[:, 1])  # channels move together
    assert len({tuple(place) for place in changed[:, 0].nonzero()[:, 1:].tolist()}) == 25


def test_evaluation_is_left_alone_and_training_is_the_same_under_every_executor() -> None:
    torch.manual_seed(0)
    network = augment(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)), ["crop 1", "flip"])
    images, labels = torch.rand(60, 1, 4, 4), torch.arange(60) % 3
    network.eval()
    assert torch.equal(network(images), network(images))
    data = FederatedData.from_arrays({"x": images.numpy(), "y": labels.numpy()}, torch.arange(60) // 11)
    found = {}
    for changes in (["crop 1", "flip"], []):
        plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        plain.load_state_dict(network.state_dict())
        trainer = LocalTrainer(Model(augment(plain, changes), cross_entropy), sgd(0.5), Batching(4, epochs=2))
        for executor in ("loop", "vmap"):
            found[bool(changes), executor] = run(
                fedavg(trainer), data, rounds=2, cohort=4, backend=Simulator(executor)
            ).params["1.weight"]
    torch.testing.assert_close(found[True, "loop"], found[True, "vmap"])
    assert not torch.allclose(found[True, "loop"], found[False, "loop"])


@pytest.mark.parametrize("name", ["turn", "crop", "crop 0", "flip 2", ""])
def test_other_changes_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="'flip' or 'crop 4'"):
        augment(torch.nn.Flatten(), [name])


def test_only_images_that_are_not_cached_are_changed() -> None:
    network = augment(torch.nn.Linear(4, 2), ["flip"]).train()
    with pytest.raises(InputError, match="Only a batch of images can be mirrored"):
        network(torch.rand(3, 4))
    request = Request("digits", ['model.augment=["flip"]', 'model.cached=["0"]', 'model.trained=["2"]'])
    with pytest.raises(InputError, match="cannot run them once"):
        build_network(request.on(request.base()), {"inputs": 64, "outputs": 10})
