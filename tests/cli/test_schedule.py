"""Recipes with late clients, and with central data from the test part or from another source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mixfed.core.delays import Dropouts, HalfNormal, SpeedClasses, none
from mixfed.core.schedule import Joining
from mixfed.data.images import images_like
from mixfed.errors import InputError
from mixfed.experiments import toml
from mixfed.experiments.build import build, build_schedule
from mixfed.experiments.folder import RunFolder
from mixfed.experiments.recipe import Recipe
from mixfed.experiments.running import run_in_folder
from mixfed.experiments.scenario import build_scenario


def digits(*settings: str) -> Recipe:
    return toml.resolve(toml.override(toml.load("digits"), settings))


def test_a_recipe_says_when_clients_report() -> None:
    assert build_schedule(digits()).delays is none
    schedule = build_schedule(
        digits(
            "schedule.delay=half_normal",
            "schedule.sd=20",
            "schedule.dropout=0.1",
            "schedule.speeds=[1.0, 3.0]",
            "schedule.late=use",
            "schedule.patience=30",
        )
    )
    assert schedule.delays == Dropouts(SpeedClasses(HalfNormal(20.0), [1.0, 3.0], []), 0.1)
    assert (schedule.late, schedule.patience, schedule.cohort) == ("use", 30.0, 10)
    with pytest.raises(InputError, match=r"schedule\.sd"):
        build_schedule(digits("schedule.delay=half_normal"))
    with pytest.raises(InputError, match="half_normal"):
        digits("schedule.delay=half_norma")
    with pytest.raises(InputError, match="synchronous"):
        replace(schedule, joining=Joining(3, 0.1))


def test_the_centre_takes_its_examples_from_the_test_part_and_never_evaluates_on_them() -> None:
    whole = build_scenario(digits("data.central.kind=none"))
    scenario = build_scenario(digits("data.central.kind=test", "data.central.examples=100"))
    assert scenario.central is not None
    assert len(scenario.central) == 100
    assert len(scenario.test) == len(whole.test) - 100
    assert scenario.clients.examples == whole.clients.examples
    together = np.concatenate([scenario.central.arrays["x"], scenario.test.arrays["x"]])
    assert np.array_equal(np.sort(together, axis=0), np.sort(whole.test.arrays["x"], axis=0))
    other_seed = build_scenario(digits("data.central.kind=test", "data.central.examples=100", "seed=1"))
    assert other_seed.central is not None
    assert np.array_equal(other_seed.central.arrays["x"], scenario.central.arrays["x"])
    with pytest.raises(InputError, match=r"data\.central\.examples"):
        build_scenario(digits("data.central.kind=test"))


def test_images_take_the_form_of_others() -> None:
    colour = np.zeros((3, 3, 8, 8), np.uint8)
    colour[:, 0] = 90
    colour[:, 1] = 60
    grey = images_like(colour, np.zeros((1, 1, 5, 5), np.uint8))
    assert grey.shape == (3, 1, 5, 5)
    assert (grey == 50).all()
    assert images_like(grey, colour).shape == (3, 3, 8, 8)
    with pytest.raises(InputError, match="bytes"):
        images_like(colour.astype(np.float32), colour)


def write_idx(folder: Path, name: str, count: int = 60) -> None:
    draw = np.random.default_rng(0)
    (folder / name).mkdir()
    for part, n in (("train", count), ("t10k", 20)):
        images = draw.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        head = b"".join(x.to_bytes(4, "big") for x in (0x803, n, 28, 28))
        (folder / name / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = (np.arange(n) % 10).astype(np.uint8)
        head = b"".join(x.to_bytes(4, "big") for x in (0x801, n))
        (folder / name / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def test_data_of_another_source_guides_feddle_under_delay(tmp_path: Path) -> None:
    write_idx(tmp_path, "fashion-mnist")
    write_idx(tmp_path, "mnist")
    table = toml.override(
        toml.load("feddle-fashion-quick"),
        [f"data.folder={tmp_path}", "data.central.kind=other", "data.central.source=mnist", "data.central.examples=40",
         "data.partition.clients=12", "cohort=3", "rounds=4", "schedule.sd=1.0", "simulator.executor=loop",
         "algorithms.feddle.objective=out_of_domain", "algorithms.feddle.head_steps=3", "data.validation=0.2",
         "algorithms.feddle.compare=validation"],
    )  # fmt: skip
    for labelled in ("center", "fed_ft", "hfcl", "parallel", "oracle", "example_transfer", "transfer"):
        with pytest.raises(InputError, match="another domain"):
            build(toml.resolve(toml.override(table, [f"algorithm={labelled}"])))
    own = ["algorithms.feddle.objective=in_domain", "algorithms.feddle.compare="]
    with pytest.raises(InputError, match="another domain"):
        build(toml.resolve(toml.override(table, own)))
    for other in ("feddf", "fedbuff"):
        build(toml.resolve(toml.override(table, [f"algorithm={other}"])))
    experiment = build(toml.resolve(table))
    assert experiment.scenario.central is not None
    assert experiment.scenario.central.arrays["x"].shape == (40, 1, 28, 28)
    folder = RunFolder(tmp_path / "run")
    result = run_in_folder(experiment, folder)
    assert folder.diagnosed() == result.diagnostics
    assert {"round", "coefficient_min", "anchor_age_max", "cosine"} <= set(result.diagnostics[-1])
    assert folder.diagnostics_plot.read_bytes().startswith(b"\x89PNG")
