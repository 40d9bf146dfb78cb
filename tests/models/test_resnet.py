"""ResNet-18: the names, sizes and variants, and weights that come from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.networks import build_model
from mixfed.experiments.scenario import build_scenario
from mixfed.models.photographs import as_photographs
from mixfed.models.resnet import ResNet18
from mixfed.models.weights import load_weights


def published_names() -> set[str]:
    """The names in torchvision's file of ResNet-18: 62 parameters, and three buffers for each of 20 BatchNorms."""
    norms, names = ["bn1"], {"conv1.weight", "fc.weight", "fc.bias"}
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            names |= {f"layer{stage}.{block}.conv{i}.weight" for i in (1, 2)}
            norms += [f"layer{stage}.{block}.bn{i}" for i in (1, 2)]
        if stage > 1:
            names.add(f"layer{stage}.0.downsample.0.weight")
            norms.append(f"layer{stage}.0.downsample.1")
    parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return names | {f"{norm}.{part}" for norm in norms for part in parts}


def test_names_and_sizes_are_the_published_ones() -> None:
    network = ResNet18(1000)
    assert set(network.state_dict()) == published_names()
    assert len(published_names()) == 122
    assert sum(p.numel() for p in network.parameters()) == 11_689_512


def test_every_stage_halves_the_image_and_the_small_stem_does_not() -> None:
    def sides(stem: Literal["large", "small"]) -> list[int]:
        network = ResNet18(3, width=16, stem=stem).eval()
        seen: list[int] = []
        for stage in range(1, 5):
            network.get_submodule(f"layer{stage}").register_forward_hook(lambda m, i, o: seen.append(o.shape[-1]))
        with torch.no_grad():
            assert network(torch.rand(2, 3, 64, 64)).shape == (2, 3)
        return seen

    assert sides("large") == [16, 8, 4, 2]
    assert sides("small") == [64, 32, 16, 8]


def test_groups_need_no_statistics() -> None:
    network = ResNet18(3, width=16, norm="group")
    assert not list(network.buffers())
    norms = [m for m in network.modules() if isinstance(m, nn.GroupNorm)]
    assert len(norms) == 20
    assert {(m.num_groups, m.num_channels) for m in norms} == {(8, 16), (16, 32), (32, 64), (32, 128)}
    with pytest.raises(ValueError, match="even width"):
        ResNet18(3, width=15, norm="group")


def test_grey_images_become_photographs() -> None:
    image = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
    made = as_photographs(image, 4, (0.5, 0.0, 0.0), (0.5, 1.0, 2.0))
    # Bilinear, not aligned at the corners: a step from 0 to 1 over two pixels is 0, ¼, ¾, 1 over four.
    row = torch.tensor([0.0, 0.25, 0.75, 1.0])
    torch.testing.assert_close(made[0, :, 0], torch.stack([(row - 0.5) / 0.5, row, row / 2]))
    assert made.shape == (1, 3, 4, 4)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_of_other_classes_load_but_for_the_head(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"published{suffix}"
    published, network = ResNet18(7, width=16), ResNet18(3, width=16)
    if suffix == ".pth":
        torch.save(published.state_dict(), file)
    else:
        save_file(published.state_dict(), file)
    head = network.fc.weight.clone()
    load_weights(network, file)
    for name, x in network.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(x, published.state_dict()[name])
    assert torch.equal(network.fc.weight, head)
    same = ResNet18(7, width=16)
    load_weights(same, file)
    assert all(torch.equal(x, published.state_dict()[name]) for name, x in same.state_dict().items())


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.pth"
    torch.save(ResNet18(3, width=16).state_dict(), file)
    with pytest.raises(InputError, match=r"another network: the file has 'bn1.bias' in another shape"):
        load_weights(ResNet18(3, width=32), file)
    with pytest.raises(InputError, match=r"the file has 'bn1.num_batches_tracked', which the network has not"):
        load_weights(ResNet18(3, width=16, norm="group"), file)
    with pytest.raises(InputError, match=r"the file has no '0.bias', which the network has"):
        load_weights(nn.Sequential(nn.Linear(2, 2)), file)
    file.write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"not a file of weights"):
        load_weights(ResNet18(3, width=16), file)
    torch.save([1, 2], file)
    with pytest.raises(InputError, match="does not hold weights by name"):
        load_weights(ResNet18(3, width=16), file)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_weights(ResNet18(3, width=16), tmp_path / "none.pth")
    (tmp_path / "w.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"not a file of weights"):
        load_weights(ResNet18(3, width=16), tmp_path / "w.safetensors")


def test_a_recipe_starts_from_the_weights_it_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"

    def start(*settings: str) -> dict[str, torch.Tensor]:
        recipe = toml.resolve(toml.override(toml.load("digits"), settings))
        return build_model(recipe, build_scenario(recipe)).initial()

    save_file(start("seed=1"), file)
    for name, x in start("seed=2", f"model.weights='{file}'").items():
        assert torch.equal(x, start("seed=1")[name])
    assert not torch.equal(start("seed=2")["1.weight"], start("seed=1")["1.weight"])
