"""Parts of a network that are run once: the numbers are those of the whole network with these parts frozen."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mixfed.data.store import CentralData, FederatedData
from mixfed.errors import InputError
from mixfed.experiments import features
from mixfed.experiments.federation import site_of
from mixfed.experiments.request import Request
from mixfed.experiments.runs import Dealer
from mixfed.experiments.using import load
from mixfed.models.chain import Chain
from tests.cli.tools import mixfed
from tests.own.test_code import NET, TINY, experiment, recipe_in

FROZEN = ['model.frozen=["body.*"]', "model.buffers=frozen"]
CACHED = ['model.cached=["body"]', 'model.trained=["head"]']


def network(width: int = 3) -> torch.nn.Module:
    parts = [torch.nn.Conv2d(3, width, 3), torch.nn.BatchNorm2d(width)]
    whole = torch.nn.Module()
    whole.add_module("blocks", torch.nn.ModuleList([*parts, torch.nn.Conv2d(width, 4, 1)]))
    whole.add_module("fc", torch.nn.Linear(4, 2))
    return whole.eval()


def test_a_chain_is_the_parts_one_after_the_other_under_their_own_names() -> None:
    whole, images = network(), torch.rand(5, 3, 8, 8)
    chain = Chain(whole, ["photographs 6", "blocks[:2]", "relu", "blocks[2:]", "mean", "flatten", "fc"]).eval()
    assert chain.state_dict().keys() == whole.state_dict().keys()
    before = Chain(whole, ["photographs 6", "blocks.0", "blocks.1", "relu"]).eval()
    after = Chain(whole, ["blocks.2", "mean", "fc"]).eval()
    assert set(after.state_dict()) == {"blocks.2.weight", "blocks.2.bias", "fc.weight", "fc.bias"}
    assert torch.equal(chain(images), after(before(images)))
    assert before(images).shape == (5, 3, 4, 4)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (["block"], "no part 'block'; it has blocks, fc, and there are the words relu, mean, flatten, photographs"),
        (["blocks[3:]"], "none of the 3 parts of 'blocks'"),
        (["fc[:1]"], "no part 'fc\\[:1\\]'"),
        ([""], "no part ''"),
        ([], "at least one part"),
    ],
)
def test_a_chain_of_parts_that_are_not_there_is_refused(steps: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Chain(network(), steps)


def test_training_on_features_is_training_with_the_rest_frozen(tmp_path: Path) -> None:
    frozen = experiment(tmp_path, *NET, *FROZEN).run()
    cached = experiment(tmp_path, *NET, *CACHED).run()
    assert cached.params.keys() == frozen.params.keys() == {"head.weight", "head.bias"}
    for name, value in frozen.params.items():
        torch.testing.assert_close(cached.params[name], value, rtol=1e-5, atol=1e-6)
    assert cached.metrics["accuracy"] == pytest.approx(frozen.metrics["accuracy"])
    assert cached.ledger["bytes_up"] == frozen.ledger["bytes_up"]


def test_features_are_kept_in_a_folder_for_every_seed_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"b.1.weight": torch.randn(6, 64), "b.1.bias": torch.zeros(6)}, tmp_path / "body.safetensors")
    weights = ["model.weights=body.safetensors", 'model.weights_parts={"body.1." = "b.1."}']
    settings = [*NET, *CACHED, *weights, "data.cache=kept"]
    first = experiment(tmp_path, *settings).scenario
    (file,) = (tmp_path / "kept").glob("features-*.npz")
    monkeypatch.setattr(features.Features, "_computed", lambda self, inputs: pytest.fail("computed again"))
    again = experiment(tmp_path, *settings, "seed=3", "data.validation=0.2", "data.label_noise=0.5").scenario
    assert again.clients.arrays["x"].shape[1:] == first.clients.arrays["x"].shape[1:] == (6,)
    assert np.array_equal(np.unique(again.test.arrays["x"]), np.unique(first.test.arrays["x"]))
    monkeypatch.undo()
    experiment(tmp_path, *settings, "model.width=5", "model.weights=", "model.weights_parts={}")
    assert len([*(tmp_path / "kept").iterdir()]) == 2  # another network has another file
    file.write_bytes(b"no archive")
    with pytest.raises(InputError, match="cannot be read"):
        experiment(tmp_path, *settings)


def test_features_do_not_depend_on_which_others_are_asked_for() -> None:
    images = np.random.default_rng(0).random((100, 3, 8, 8), np.float32)
    body = Chain(network(), ["blocks[:1]"])
    all_at_once = features.Features(body).of(CentralData({"x": images})).arrays["x"]
    some = features.Features(body).of(CentralData({"x": images[[70, 3, 70]]})).arrays["x"]
    assert np.array_equal(some, all_at_once[[70, 3, 70]])


def test_a_trained_network_answers_to_examples_and_not_to_features(tmp_path: Path) -> None:
    settings = [word for text in (*TINY, *NET, *CACHED) for word in ("--set", text)]
    mixfed("run", recipe_in(tmp_path), *settings, "--out", tmp_path / "run")
    answers = load(tmp_path / "run")
    assert answers(torch.rand(4, 64)).shape == (4, 10)
    assert {"body.1.weight", "head.weight"} <= set(answers.state_dict())


def test_data_are_dealt_again_for_a_network_with_other_features(tmp_path: Path) -> None:
    deal = Dealer()
    wide, narrow = (experiment(tmp_path, *NET[:1], f"model.width={n}", *CACHED).recipe for n in (6, 5))
    assert deal(wide).clients.arrays["x"].shape[1:] == (6,)
    assert deal(narrow).clients.arrays["x"].shape[1:] == (5,)


def test_what_features_need_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"name the parts after them in model\.trained"):
        experiment(tmp_path, *NET, CACHED[0])
    with pytest.raises(InputError, match="no part 'bdy'"):
        experiment(tmp_path, *NET, 'model.cached=["bdy"]', CACHED[1])
    with pytest.raises(InputError, match=r"The parts in model\.cached do not take the examples"):
        experiment(tmp_path, *NET, 'model.cached=["head"]', CACHED[1])
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)  # as if it were not installed
    with pytest.raises(InputError, match="needs two packages"):
        experiment(tmp_path, "model.name=efficientnet_lite0")


def test_a_site_of_a_federation_computes_the_features_of_its_own_data(tmp_path: Path) -> None:
    settings = [*TINY, *NET, *CACHED, "data.central.kind=none", "algorithm=fedavg"]
    request = Request(recipe_in(tmp_path), settings, backend="flower")
    own = FederatedData.from_arrays({"x": np.ones((4, 64), np.float32), "y": np.arange(4)}, [0, 0, 1, 1])
    node = {"clients": "0-1", "folder": str(tmp_path / "kept")}
    site = site_of(request.on(request.base()), node, data=lambda node: (own, {"test": own}), classes=10)
    (holding,) = site.holdings.values()
    assert holding.data.arrays["x"].shape == holding.tests["test"].arrays["x"].shape == (4, 6)
