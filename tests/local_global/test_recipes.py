"""The recipes lg-*: every section has its effect, on small data of the same kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mixfed.algorithms.fedavg import fedavg
from mixfed.backends.run import run
from mixfed.cli import app
from mixfed.core.batches import Batching
from mixfed.core.checkpoint import Checkpoints
from mixfed.core.losses import cross_entropy
from mixfed.core.model import Model
from mixfed.core.optim import sgd
from mixfed.core.schedule import Joining, Schedule
from mixfed.core.train import LocalTrainer
from mixfed.data.scenario import join_device, keep_own
from mixfed.data.sources import Source
from mixfed.data.store import FederatedData
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.build import build
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.split import search
from mixfed.models.lenet import lenet5
from mixfed.models.networks import mlp

SMALL = ["rounds=6", "evaluate.every=3", "simulator.executor=loop", "client.epochs=1"]
LG = "algorithms.lg_fedavg"


def resolved(*settings: str, name: str = "lg-digits") -> Recipe:
    return toml.resolve(toml.override(toml.load(name), [*SMALL, f"{LG}.warm_start=2", *settings]))


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "local", "mtl", "lg_fedavg"])
def test_digits_runs_with_every_rival(algorithm: str) -> None:
    result = build(resolved(f"algorithm={algorithm}", f"{LG}.warm_start=3")).run()
    assert set(result.metrics) == {"accuracy_local", "accuracy_new", "accuracy_averaged"}
    assert (result.ledger["bytes_once"] > 0) == (algorithm not in ("fedavg", "fedprox"))


def test_the_networks_have_the_papers_sizes() -> None:
    def sizes(module: torch.nn.Module) -> list[int]:
        return [p.numel() for p in module.parameters()]

    lenet = sizes(lenet5(3, 32, 10))
    assert (sum(lenet), sum(lenet[:4])) == (64_102, 2_872)
    network = sizes(mlp(784, 10, [512, 256, 256, 128]))
    assert (sum(network), sum(network[-6:])) == (633_226, 99_978)


def test_private_parts_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    memory, disk = (
        build(resolved(f"{LG}.warm_start=2", f"simulator.private={where}")).run(
            checkpoints=Checkpoints(tmp_path / where, every=2)
        )
        for where in ("memory", "disk")
    )
    assert memory.history == disk.history
    assert list((tmp_path / "disk" / "private").iterdir())
    with pytest.raises(InputError, match="beside the checkpoints"):
        build(resolved("simulator.private=disk")).run()


@pytest.mark.parametrize("kind", ["supervised", "autoencoder"])
def test_auxiliary_models_stay_on_the_client(kind: str) -> None:
    recipe = resolved(f"auxiliary.kind={kind}", f"{LG}.names=['head.']", f"{LG}.warm_start=0")
    result = build(recipe).run()
    assert result.privates is not None
    local = result.privates.get("clients", int(result.privates.seen("clients")[0]))["local"]
    assert any(name.startswith("auxiliary.") for name in local)
    assert not any(name.startswith("head.") for name in local)


def test_every_split_is_tried() -> None:
    found = list(search(resolved(f"{LG}.warm_start=0", "rounds=2")))
    assert [(s.side, s.layers) for s in found] == [
        *[("last", n) for n in range(4)],
        *[("first", n) for n in range(1, 3)],
    ]
    assert found[0].sent == 0
    assert [s.sent for s in found] == [2 * 2 * 10 * s.parameters for s in found]
    with pytest.raises(InputError, match="chosen on validation data"):
        next(search(resolved("data.validation=0.0")))


def test_split_command_and_run_with_split_search() -> None:
    small = [option for setting in [*SMALL, "rounds=1", f"{LG}.warm_start=0"] for option in ("--set", setting)]
    found = []
    for command in (["split", "lg-digits"], ["run", "lg-digits", "--split-search"]):
        done = CliRunner().invoke(app, [*command, *small, "--json"])
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.output.splitlines()[-1]))
    assert len(found[0]) == 6
    assert found[0] == found[1]


def test_compare_shows_what_the_new_test_would_send_once(tmp_path: Path) -> None:
    small = [option for setting in [*SMALL, "rounds=1", f"{LG}.warm_start=0"] for option in ("--set", setting)]
    for algorithms, shown in (("fedavg", False), ("fedavg,lg_fedavg", True)):
        out = ["--out", str(tmp_path / algorithms)]
        done = CliRunner().invoke(app, ["compare", "lg-digits", "--algorithms", algorithms, *small, *out])
        assert done.exit_code == 0, done.output
        assert (" once " in done.output) == shown


def test_the_base_of_lg_fedavg_has_its_own_settings() -> None:
    near, free = (
        build(resolved(f"{LG}.base=fedprox", f"algorithms.fedprox.mu={mu}", "rounds=3")).run() for mu in (5.0, 0.0)
    )
    assert any(not torch.equal(x, free.params[n]) for n, x in near.params.items())


def test_an_auxiliary_model_is_private_whatever_layers_are_global() -> None:
    for side in ("last", "first"):
        made = build(resolved("auxiliary.kind=autoencoder", f"{LG}.side={side}", f"{LG}.layers=1", "rounds=4")).run()
        assert made.privates is not None
        kept = made.privates.get("clients", int(made.privates.seen("clients")[0]))["local"]
        assert any(name.startswith("auxiliary.") for name in kept)
        assert ("head.2.weight" in kept) == (side == "first")
        assert any(name.startswith("encoder.") for name in kept) == (side == "last")


@pytest.mark.parametrize(
    "option", [["--algorithm", "fedavg"], ["--rounds", "3"], ["--track", "tensorboard"], ["--resume"]]
)
def test_curves_in_closed_form_refuse_what_they_cannot_heed(option: list[str]) -> None:
    done = CliRunner().invoke(app, ["run", "lg-synthetic", *option])
    assert done.exit_code == 2
    assert f"leave out {option[0]}" in " ".join(done.output.split())
    compared = CliRunner().invoke(app, ["compare", "lg-synthetic", "--algorithms", "fedavg"])
    assert compared.exit_code == 2
    assert "draw them with 'mixfed run'" in " ".join(compared.output.split())


@pytest.mark.parametrize(
    ("option", "told"), [(["--resume"], "--resume"), (["--out", "x"], "--out"), (["--algorithm", "mtl"], "lg_fedavg")]
)
def test_split_search_refuses_what_it_cannot_heed(option: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["run", "lg-digits", "--split-search", *option])
    assert done.exit_code == 2
    assert told in done.output


def pictures(n: int) -> dict[str, np.ndarray]:
    return {"x": np.arange(n * 4, dtype=np.uint8).reshape(n, 1, 2, 2), "y": np.arange(n) % 2}


def test_a_joining_device_has_turned_images() -> None:
    source = Source(pictures(20), pictures(6), None, 2, None, "", "")
    parts = keep_own(FederatedData.from_arrays(pictures(12), np.arange(12) // 4), {"test": 0.25}, 0)
    joined = join_device(parts, source, {"train": 5, "test": 2}, 90, 0)
    assert {name: len(data) for name, data in joined.items()} == {"train": 4, "test": 4}
    assert joined["train"].sizes()[-1] == 5
    turned = joined["train"].client(3)["x"]
    originals = {x.tobytes() for x in source.train["x"]}
    assert not any(x.tobytes() in originals for x in turned)
    assert all(np.ascontiguousarray(np.rot90(x, -1, (-2, -1))).tobytes() in originals for x in turned)
    with pytest.raises(InputError, match="cannot hold 30"):
        join_device(parts, source, {"train": 30}, 90, 0)


def test_who_is_asked_before_and_after_a_device_joins() -> None:
    joining = Joining(round=3, fraction=0.2)
    assert all(10 not in joining.cohort(0, r, "clients", 11, 4) for r in range(3))
    assert all(len(joining.cohort(0, r, "clients", 11, 4)) == 4 for r in range(3))
    later = [joining.cohort(0, r, "clients", 11, 4) for r in range(3, 9)]
    assert all(len(c) == 3 and c[-1] == 10 and len(set(c.tolist())) == 3 for c in later)
    assert [r for r in range(9) if Joining(3, 0.2, settle=2).settling(r)] == [3, 4]
    assert Joining(3, 0.0).cohort(0, 3, "clients", 11, 4).tolist() == [10]
    with pytest.raises(InputError, match="share from 0 to 1"):
        Joining(1, 1.5)


def test_a_device_that_joins_has_to_fit_the_run() -> None:
    data = FederatedData.from_datasets([{"x": np.zeros((2, 2), np.float32), "y": np.zeros(2, np.int64)}] * 4)
    trainer = LocalTrainer(Model(mlp(2, 2, []), cross_entropy), sgd(0.1), Batching(0, steps=1))
    with pytest.raises(InputError, match="from the 3 clients"):
        run(fedavg(trainer), data, rounds=3, schedule=Schedule(4, joining=Joining(1, 0.5)))
    with pytest.raises(InputError, match="never joins a run of 3"):
        run(fedavg(trainer), data, rounds=3, schedule=Schedule(2, joining=Joining(3, 0.5)))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["evaluate.sets=['joined']"], "No device joins"),
        (["data.own_test=0.0"], "set data.own_test"),
        (["data.own_test=0.9", "data.own_validation=0.2"], "below 1"),
        (["data.joining.round=2", "data.joining.train=9", "data.joining.test=9"], "square images"),
        (["evaluate.sets=['postfit']"], "no adversary"),
        (["auxiliary.kind=adversary"], "data.protected"),
        ([f"{LG}.layers=4"], "has 3 layers"),
        ([f"{LG}.base=lg_fedavg"], "another can be built on"),
        ([f"{LG}.base=oracle"], "another can be built on"),
        ([f"{LG}.base=center"], "trains on data at the centre, and there is none"),
        ([f"{LG}.names=['hed.']"], "begins with 'hed.'"),
        ([f"{LG}.warm_start=6"], "leaves no round of 6"),
        (["auxiliary.kind=autoencoder", "auxiliary.weight=-5.0"], "must be at least 0"),
        (["auxiliary.kind=autoencoder", "auxiliary.dropout=1.5"], "at least 0 and below 1"),
    ],
)
def test_refusals(settings: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        build(resolved(*settings)).run()
