"""The linear theory: the closed form, its optimum, and the measurement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mixfed.cli import app
from mixfed.errors import InputError
from mixfed.experiments.theory import SETTINGS, Linear

ALPHAS = [i / 10 for i in range(11)]


def test_the_optimum_is_where_the_closed_form_is_least() -> None:
    fine = np.linspace(0, 1, 100_001)
    for setting in SETTINGS:
        assert fine[np.argmin(setting.error(fine))] == pytest.approx(setting.best, abs=1e-4)
    assert [round(s.best, 2) for s in SETTINGS] == [0.99, 0.75, 0.52, 0.11]


def test_the_middle_settings_beat_both_ends() -> None:
    for setting in SETTINGS[1:3]:
        assert setting.error(setting.best) < 0.8 * min(setting.error(0.0), setting.error(1.0))


def test_measured_within_five_percent_of_the_closed_form() -> None:
    """A smaller problem with many devices, so that one draw's spread of √(2/(M·d)) is small."""
    setting = Linear(sigma=1.5, rho=0.1, dimension=5, devices=400, examples=400, test=100)
    measured = np.mean([setting.measure(ALPHAS, seed) for seed in range(4)], axis=0)
    np.testing.assert_allclose(measured, setting.error(np.array(ALPHAS)), rtol=0.05)


def test_training_reaches_least_squares() -> None:
    setting = Linear(rho=0.3, dimension=4, devices=3, examples=50, test=2000)
    data, true = setting.draw(1)
    own = [np.linalg.lstsq(data.client(m)["x"], data.client(m)["y"], rcond=None)[0] for m in range(3)]
    wanted = np.mean([np.square(u - t).sum() / 3 for u, t in zip(own, true, strict=True)])
    assert setting.measure([1.0], 1)[0] == pytest.approx(wanted, rel=0.1)


def test_the_recipe_runs(tmp_path: Path) -> None:
    small = ["--set", "theory.devices=5", "--set", "theory.examples=30", "--set", "theory.test=10"]
    small += ["--set", "theory.dimension=3", "--set", "theory.seeds=1", "--set", "theory.alphas=3"]
    done = CliRunner().invoke(app, ["run", "lg-synthetic", *small, "--out", str(tmp_path / "t")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "t" / "theory.json").is_file()
    assert (tmp_path / "t" / "theory.png").is_file()


@pytest.mark.parametrize("examples", [6, 12, 60])
def test_few_examples_are_still_solved_to_the_end(examples: int) -> None:
    """Where the Hessian is far from κI: against least squares, not against the closed form of many examples."""
    setting = Linear(dimension=3, devices=4, examples=examples, test=20_000)
    data, true = setting.draw(2)
    own = [np.linalg.lstsq(data.client(m)["x"], data.client(m)["y"], rcond=None)[0] for m in range(4)]
    wanted = np.mean([np.square(u - t).sum() / 3 for u, t in zip(own, true, strict=True)])
    assert setting.measure([1.0], 2)[0] == pytest.approx(wanted, rel=0.05)


def test_refusals() -> None:
    with pytest.raises(InputError, match="give at least 40"):
        Linear(examples=10)
    with pytest.raises(InputError, match="cannot be negative"):
        Linear(rho=-1.0)
