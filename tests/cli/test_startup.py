"""Help, lists and refusals come at once: nothing that takes long to load is imported for them."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from mixfed.algorithms.registry import ALGORITHMS
from mixfed.core.registry import OPTIMIZERS
from mixfed.deferred import Deferred
from mixfed.experiments.schema import parameters
from mixfed.models import MODELS

SLOW = ["torch", "matplotlib", "sklearn", "scipy", "pandas", "pyarrow", "datasets", "safetensors"]
COMMANDS = {
    "--help": "compare",
    "--version": version("mixfed"),
    "list": "movielens",
    "run --help": "--set",
    "run digitz": "did you mean 'digits'",
    "run digits --set client.momentom=0.1": "did you mean 'client.momentum'",
    "run digits --set client.optimizer=sdg": "choose from sgd",
    "run digits --set model.hidden=3": "takes a list",
    "run digits --set evaluate.metrics=['acuracy']": "did you mean 'accuracy'",
    "run digits --algorithm feddle --set algorithms.feddle.objective=nearby": "in_domain",
    "run digits --executor fast": "vmap",
    "compare digits --algorithms fedavgg": "did you mean 'fedavg'",
    "compare digits --algorithms fedavg --seeds one": "whole number",
    "study feddle-atlas --set rounds=many": "whole number",
    "tune digits --algorithms fedavg --grid client.learning_rate=quick": "takes a number",
    "probe digits --set roundz=1": "did you mean 'rounds'",
    "advise digits --set roundz=1": "did you mean 'rounds'",
    "flower local digits --set roundz=1": "did you mean 'rounds'",
    "flower init app --recipe digitz": "did you mean 'digits'",
    "split digits --set data.partition.kind=dirichle": "did you mean 'dirichlet'",
    "data digits --set data.source=digitz": "did you mean 'digits'",
}
SCRIPT = """
import contextlib, io, json, shlex, sys, traceback
slow, commands = map(json.loads, sys.argv[1:])
sys.modules.update(dict.fromkeys(slow))  # importing one of them fails, and the traceback shows who does
from mixfed.cli import app
said = {}
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            app(shlex.split(command, posix=False))
        except SystemExit:
            pass
        except BaseException:
            traceback.print_exc()
    said[command] = out.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each command says in a process that cannot import what is slow."""
    words = [sys.executable, "-c", SCRIPT, json.dumps(SLOW), json.dumps(list(COMMANDS))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers_without_what_is_slow(command: str, said: dict[str, str]) -> None:
    assert "Traceback" not in said[command], f"mixfed {command} imports what is slow:\n{said[command]}"
    assert COMMANDS[command] in " ".join(said[command].split())


DEFERRED = MODELS | OPTIMIZERS | {name: inspect.unwrap(entry.make) for name, entry in ALGORITHMS.items()}


@pytest.mark.parametrize("name", DEFERRED)
def test_settings_read_from_a_text_are_those_of_the_function(name: str) -> None:
    function = DEFERRED[name]
    assert isinstance(function, Deferred)
    assert list(parameters(function).items()) == list(parameters(function.load()).items())


def test_dir_shows_the_public_names_only() -> None:
    import mixfed.cli.run  # which puts modules into the package

    assert set(dir(mixfed)) == {*mixfed.__all__, "lookups", "trackers", "tree", "__version__"}
    assert mixfed.__version__ == version("mixfed")
