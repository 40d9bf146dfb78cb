"""The examples run as they are, and the public names are what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import mixfed

ROOT = Path(__file__).parents[1]


def test_bring_your_own() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "bring_your_own.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    accuracy = {name: float(value) for name, value in re.findall(r"(\w+): accuracy ([\d.]+)", done.stdout)}
    assert accuracy["fedavg"] < 0.55  # it has never seen the other five digits
    assert accuracy["gradient_2way"] > 0.85


def test_public_names() -> None:
    assert len(set(mixfed.__all__)) == len(mixfed.__all__)
    assert set(mixfed.__all__) == set(mixfed._HOME)
    for name in mixfed.__all__:
        assert getattr(mixfed, name) is getattr(sys.modules[mixfed._HOME[name]], name)


def test_the_function_run_is_not_hidden_by_its_module() -> None:
    from mixfed import run
    from mixfed.backends.run import run as same

    assert run is same
    assert mixfed.run is same


def test_the_readme_shows_that_example_and_every_method() -> None:
    from mixfed.algorithms.registry import ALGORITHMS

    readme = (ROOT / "README.md").read_text()
    example = (ROOT / "examples" / "bring_your_own.py").read_text()
    assert example.split('"""', 2)[2].strip() in readme
    for name in ALGORITHMS:
        assert f"| `{name}` |" in readme, name


def test_the_recipe_in_the_docs_is_one() -> None:
    from mixfed.experiments import toml

    text = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.DOTALL)[0]
    recipe = toml.resolve(tomllib.loads(text))
    assert recipe.published == {"fedavg": {"accuracy": 0.44}}
