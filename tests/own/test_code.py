"""Networks, criteria, metrics and algorithms of the user's own, by their names in a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.errors import InputError
from mixfed.experiments.build import Experiment, build
from mixfed.experiments.request import Request
from mixfed.experiments.using import load
from tests.cli.tools import here, last_json, mixfed
from tests.own.code import write_code

TINY = [
    "rounds=2",
    "cohort=3",
    "data.partition.kind=iid",
    "data.partition.clients=10",
    "evaluate.every=1",
    "evaluate.sets=['all']",
]
NET = ["model.name=net.py:Net", "model.width=6"]


def recipe_in(folder: Path, text: str = "") -> str:
    """A recipe beside a user's own files."""
    write_code(folder)
    file = folder / "mine.toml"
    file.write_text(f'base = "digits"\n{text}')
    return str(file)


def experiment(folder: Path, *settings: str, text: str = "", **options: str) -> Experiment:
    """What a recipe of the user's own comes to with these settings."""
    request = Request(recipe_in(folder, text), ["simulator.executor=loop", *TINY, *settings], **options)
    return build(request.on(request.base()))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_network_with_its_settings_and_a_module_beside_it(tmp_path: Path) -> None:
    model = experiment(tmp_path, *NET).algorithm.model
    assert model.shapes["body.1.weight"] == (6, 64)  # from layers.py, with the sizes of the data
    assert model.shapes["head.weight"] == (10, 6)


def test_an_algorithm_has_its_settings_under_its_name(tmp_path: Path) -> None:
    plain = experiment(tmp_path, *NET, algorithm="fedavg").run().params
    whole = experiment(tmp_path, *NET, algorithm="method.py:shortened").run().params
    assert same(plain, whole)
    assert same(plain, experiment(tmp_path, *NET, algorithm="method.py:of_setup").run().params)
    text = 'algorithm = "method.py:shortened"\n[algorithms.shortened]\nshare = 0.0\n[for.shortened.client]\nsteps = 1\n'
    stays = experiment(tmp_path, *NET, text=text)
    assert stays.recipe.client.steps == 1
    assert same(stays.run().params, stays.algorithm.model.initial())


def test_a_criterion_and_a_metric(tmp_path: Path) -> None:
    metrics = "evaluate.metrics=['loss', 'net.py:confidence']"
    plain = experiment(tmp_path, *NET, "client.learning_rate=0.1", metrics).run()
    halved = experiment(tmp_path, *NET, "client.learning_rate=0.2", metrics, "model.criterion=net.py:halved").run()
    assert halved.metrics["loss"] == pytest.approx(plain.metrics["loss"] / 2, rel=1e-5)
    assert halved.metrics["confidence"] == pytest.approx(plain.metrics["confidence"], rel=1e-5)
    over_bytes = ["evaluate.sets=['local']", "data.own_test=0.3", "backend=loopback"]
    assert 0 < experiment(tmp_path, *NET, metrics, *over_bytes).run().metrics["confidence_local"] < 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("raise SystemExit(7)", r"net.py fails in line 1 with SystemExit: 7\."),
        ("def confidence(outputs, batch): return outputs.nosuch", "The metric 'confidence' fails: .* 'nosuch'"),
    ],
)
def test_code_that_fails_is_told_in_a_sentence(tmp_path: Path, line: str, told: str) -> None:
    recipe_in(tmp_path)
    (tmp_path / "net.py").write_text(f"{line}\n")
    request = Request(str(tmp_path / "mine.toml"), [*TINY, "evaluate.metrics=['net.py:confidence']"], executor="loop")
    with pytest.raises(InputError, match=told):
        build(request.on(request.base())).run()


def test_own_things_in_a_comparison_that_is_resumed(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, f'{METHODS}[tune.shortened]\n"algorithms.shortened.share" = [0.5, 1.0]\n')
    options = [word for setting in [*TINY, *NET] for word in ("--set", setting)]
    compared = ["compare", recipe, "--algorithms", "fedavg,shortened", "--out", str(tmp_path / "both"), *options]
    found = last_json(mixfed(*compared, "--json", cwd=Path("/")))
    assert (
        found["algorithms"]["shortened"]["metrics"]["accuracy"] == found["algorithms"]["fedavg"]["metrics"]["accuracy"]
    )
    assert (tmp_path / "both" / "shortened-seed0" / "result.json").exists()
    here(*compared, "--resume")
    others = ["fedavg,method.py:of_setup" if word == "fedavg,shortened" else word for word in compared]
    here(*others, "--resume")  # FedAvg has no part in other methods
    here("run", tmp_path / "both" / "shortened-seed0" / "config.toml", "--out", tmp_path / "again")
    one, two = (tmp_path / f / "model.safetensors" for f in ("both/shortened-seed0", "again"))
    assert one.read_bytes() == two.read_bytes()


METHODS = '[methods]\nshortened = "method.py:shortened"\n'


def test_a_network_whose_code_has_changed_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = [word for setting in [*TINY, *NET] for word in ("--set", setting)]
    here("run", recipe_in(tmp_path), "--out", tmp_path / "run", *options)
    load(tmp_path / "run")
    assert not caplog.messages
    (tmp_path / "layers.py").write_text((tmp_path / "layers.py").read_text().replace("ReLU", "Tanh"))
    (tmp_path / "net.py").write_text((tmp_path / "net.py").read_text() + "# read anew\n")
    load(tmp_path / "run")
    assert [message.partition(" since")[0] for message in caplog.messages] == [
        "The file layers.py has changed",
        "The file net.py has changed",
    ]


@pytest.mark.parametrize("executor", ["loop", "vmap", "factored"])
def test_what_is_frozen_is_neither_trained_nor_sent(tmp_path: Path, executor: str) -> None:
    frozen = experiment(tmp_path, *NET, 'model.frozen=["body.*"]', f"simulator.executor={executor}")
    model, result = frozen.algorithm.model, frozen.run()
    assert set(result.params) == {"head.weight", "head.bias"}
    assert result.ledger["bytes_down"] == 2 * 3 * 4 * (6 * 10 + 10)  # rounds, clients, bytes, numbers
    batch = {"x": torch.randn(5, 64), "y": torch.zeros(5, dtype=torch.int64)}
    in_training, after = (model.outputs(model.initial(), batch, training=t) for t in (True, False))
    assert torch.equal(in_training, after)  # BatchNorm of the frozen body uses the statistics that it started with


def test_the_statistics_of_batch_norm_can_be_frozen_alone(tmp_path: Path) -> None:
    model = experiment(tmp_path, *NET, "model.buffers=frozen").algorithm.model
    assert not model.buffers
    assert "body.2.weight" in model.trainable
    assert not model.has_batch_norm  # whose batches would have to be full


def test_parts_of_a_network_start_from_a_file(tmp_path: Path) -> None:
    weights = {"encoder.1.weight": torch.full((6, 64), 0.25), "encoder.1.bias": torch.zeros(6), "other": torch.ones(2)}
    save_file(weights, tmp_path / "body.safetensors")
    parts = 'model.weights_parts={"body.1." = "encoder.1."}'
    fresh = experiment(tmp_path, *NET).algorithm.model.initial()
    start = experiment(tmp_path, *NET, "model.weights=body.safetensors", parts).algorithm.model.initial()
    assert torch.equal(start["body.1.weight"], weights["encoder.1.weight"])
    assert torch.equal(start["head.weight"], fresh["head.weight"])
    with pytest.raises(InputError, match=r"No weight in .* begins with 'encodr\.'"):
        experiment(tmp_path, *NET, "model.weights=body.safetensors", 'model.weights_parts={"body." = "encodr."}')


def test_networks_of_torchvision_and_timm_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins that have the functions and parameters of the two packages."""

    def create(name: str, *, num_classes: int, width: int = 3, **others: object) -> torch.nn.Module:
        assert others in ({"weights": None}, {"pretrained": False, "in_chans": 3})
        return torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, num_classes))

    names = {"list_models": lambda module=None: ["resnet18", "vgg11"]}
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchvision.models", SimpleNamespace(get_model=create, **names))
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create, **names))
    for name in ("torchvision:resnet18", "timm:resnet18"):
        model = experiment(tmp_path, f"model.name={name}", "model.width=5").algorithm.model
        assert model.shapes["1.weight"] == (10, 5)
    with pytest.raises(InputError, match="did you mean 'timm:resnet18'"):
        experiment(tmp_path, "model.name=timm:resnet81")


def test_frozen_patterns_must_match_something() -> None:
    with pytest.raises(InputError, match=r"Nothing in the network is named 'bdy.\*'"):
        Model(torch.nn.Sequential(torch.nn.Linear(4, 2)), cross_entropy, frozen=["bdy.*"])


PACKAGE = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width, num_classes):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.BatchNorm1d(width))
        self.head = torch.nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.body(x))

    @classmethod
    def from_name(cls, model_name, num_classes):
        return cls({"small": 4}[model_name], num_classes)
"""


def test_a_function_of_a_class_in_a_package_starts_from_weights_inside_another(tmp_path: Path) -> None:
    (tmp_path / "standin_net").mkdir()
    (tmp_path / "standin_net" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "standin_weights").mkdir()
    (tmp_path / "standin_weights" / "__init__.py").write_text("")
    published = {f"body.1.{n}": torch.full(s, 0.5) for n, s in (("weight", (4, 64)), ("bias", (4,)))}
    save_file(published, tmp_path / "standin_weights" / "small.safetensors")
    made = ["model.name=standin_net:Net.from_name", "model.model_name=small"]
    weights = ["model.weights=standin_weights:small.safetensors", 'model.weights_parts={"body.1." = "body.1."}']
    whole = experiment(tmp_path, *made, *weights, 'model.frozen=["body.*"]', "model.buffers=frozen")
    model = whole.algorithm.model
    assert set(model.trainable) == {"head.weight", "head.bias"}
    assert model.shapes["head.weight"] == (10, 4)  # num_classes is what the data say
    assert not model.buffers
    with pytest.raises(InputError, match=r"did you mean 'standin_net:Net\.from_name'"):
        experiment(tmp_path, "model.name=standin_net:Net.from_nam")


def test_torchvision_is_used_without_its_compiled_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that, as torchvision does, describes an operator which only its compiled part would define."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "import torch\nif not hasattr(torch.ops.torchvision, 'nms'):\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    (tmp_path / "torchvision" / "models.py").write_text(
        "import torch\n"
        "def list_models(module=None): return ['flat']\n"
        "def get_model(name, weights, num_classes): return torch.nn.Linear(64, num_classes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        model = experiment(tmp_path, "model.name=torchvision:flat").algorithm.model
    finally:
        for name in ("torchvision", "torchvision.models"):
            sys.modules.pop(name, None)
    assert model.shapes["weight"] == (10, 64)
