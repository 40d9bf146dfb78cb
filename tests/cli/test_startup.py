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
REFUSED = {
    "rounds=0": "at least 1",
    "cohort=0": "at least 1",
    "client.steps=-1": "steps and epochs must be at least 1",
    "client.epochs=-1": "steps and epochs must be at least 1",
    "client.batch_size=-1": "Batch size cannot be negative",
    "client.learning_rate=-1": "A learning rate is a number that is at least 0",
    "client.momentum=1.5": "at least 0 and below 1",
    "client.clip=-1": "a norm above 0",
    "client.bound=-1": "'client.bound' must be at least 0",
    "central.steps=-1": "In [central]",
    "central.weight_decay=-1": "Weight decay",
    "server.learning_rate=-1": "In [server]",
    "merge.learning_rate=-1": "In [merge]",
    "mixing.w_c=-1": "'mixing.w_c' must be at least 0",
    "evaluate.every=0": "'evaluate.every' must be at least 1",
    "evaluate.best_of_last=0": "'evaluate.best_of_last' must be at least 1",
    "checkpoint.every=0": "'checkpoint.every' must be at least 1",
    "stop.patience=0": "'stop.patience' must be at least 1",
    "stop.minutes=-1": "'stop.minutes' must be at least 0",
    "schedule.buffer=-1": "'schedule.buffer' must be at least 0",
    "simulator.threads=-1": "at least 1",
    "simulator.memory=0": "'simulator.memory' must be at least 1",
    "simulator.timeout=0": "above 0",
    "federation.deadline=0": "above 0",
    "data.validation=1.5": "below 1",
    "data.label_noise=-0.1": "a share from 0 to 1",
    "auxiliary.steps=0": "'auxiliary.steps' must be at least 1",
    "model.name=mpl": "did you mean 'mlp'",
    "rounds=many": "takes a whole number",
    "cohort=2.5": "takes a whole number",
    "client.shuffle=1": "true or false",
}
COMMANDS |= {f"run digits --set {setting}": told for setting, told in REFUSED.items()}
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
