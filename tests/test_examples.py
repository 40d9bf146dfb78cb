"""The example is the one that the README shows (and :mod:`tests.test_pages` runs); public names are what they say."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import import_module
from pathlib import Path

import mixfed

ROOT = Path(__file__).parents[1]


def test_public_names_are_what_type_checkers_see() -> None:
    """The imports for type checkers, the names that are imported when used, and ``__all__`` say the same."""
    code = ast.parse(Path(mixfed.__file__).read_text())
    (block,) = [x for x in code.body if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING"]
    seen = {name.name: x.module for x in block.body if isinstance(x, ast.ImportFrom) for name in x.names}
    assert sorted(seen) == sorted(mixfed.__all__)
    for name, module in seen.items():
        assert getattr(mixfed, name) is getattr(import_module(str(module)), name), name


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
