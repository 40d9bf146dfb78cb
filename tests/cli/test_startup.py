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
    "client.steps=-1": "'client.steps' must be at least 0",
    "client.epochs=-1": "'client.epochs' must be at least 0",
    "client.batch_size=-1": "'client.batch_size' must be at least 0",
    "client.learning_rate=-1": "'client.learning_rate' must be at least 0, not -1.0",
    "client.momentum=1.5": "at least 0 and below 1",
    "client.clip=-1": "'client.clip' must be at least 0",
    "client.bound=-1": "'client.bound' must be at least 0",
    "central.steps=-1": "'central.steps' must be at least 0",
    "central.weight_decay=-1": "'central.weight_decay' must be at least 0",
    "server.learning_rate=-1": "'server.learning_rate' must be at least 0",
    "merge.learning_rate=-1": "'merge.learning_rate' must be at least 0",
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
OF_ALGORITHMS = {
    "fedavg.foo=1": "nothing can be set there",
    "fedprox.nu=1": "did you mean 'algorithms.fedprox.mu'",
    "fedprox.mu=-1": "'algorithms.fedprox.mu' must be at least 0, not -1.0",
    "fedprox.mu=much": "takes a number",
    "fedavgm.momentum=1": "at least 0 and below 1",
    "fedadam.betas=[0.9,2]": "at least 0 and below 1, not 2.0",
    "fedyogi.epsilon=0": "a number above 0",
    "fedadagrad.initial=-1": "at least 0",
    "fedasync.alpha=0": "above 0 and at most 1",
    "fedasync.rule=steps": "choose from constant, polynomial, hinge",
    "fedbuff.buffer=-1": "'algorithms.fedbuff.buffer' must be at least 0",
    "ca2fl.buffer=-1": "at least 0",
    "mtl.lambda1=-1": "at least 0",
    "transfer.central_rounds=-1": "at least 0",
    "parallel.alpha=2": "a share from 0 to 1",
    "gradient_1way.central_batch_size=-1": "at least 0",
    "gradient_2way.by_clients=2": "true or false",
    "example_transfer.ratio=1": "at least 0 and below 1",
    "example_transfer={ratio=0.5,count=3}": "In [algorithms.example_transfer]: Example transfer takes either",
    "lg_fedavg.base=fedavgg": "an algorithm that another can be built on",
    "lg_fedavg.side=middle": "choose from last, first",
    "lg_fedavg.warm_start=-1": "at least 0",
    "lg_fedavg.warm_start=1000": "A warm start of 1000 rounds leaves no round",
    "feddf.temperature=0": "a number above 0",
    "fed_ft.base=feddle": "choose from fedbuff, fedavg",
    "feddle.atlas=0": "at least 1",
    "feddle.bits=4": "8 or 32",
    "feddle.tail=2": "a share from 0 to 1",
    "feddle.regularisation=-1": "at least 0",
    "feddle.head_steps=0": "at least 1",
    "feddle.fallback=lg_fedavg": "an algorithm that another can be built on",
    "feddle_plus.held_out=1": "at least 0 and below 1",
}
"""Settings of algorithms: names, types, ranges, and what they must be for each other."""

OF_OTHERS = {
    "data.partition.alpha=-1": "'data.partition.alpha' must be a number above 0",
    "data.partition.clients=0": "'data.partition.clients' must be at least 1",
    "data.partition.min_size=0": "at least 1",
    "data.partition.beta=1": "There is no setting 'data.partition.beta'",
    "data.partition={kind='shards',clients=3,classes_per_client=0}": "at least 1",
    "data.partition={kind='shards',clients=3}": "needs data.partition.classes_per_client",
    "data.partition={kind='quantity_skew',clients=3}": "In [data.partition]: quantity_skew needs one of alpha",
    "data.partition={kind='natural',group=0}": "at least 1",
    "data.central.kind=fraction": "data.central.fraction is a share above 0",
    "data.central.kind=file": "is for data.source = 'files'",
    "data.central={kind='other',source='cifar11'}": "did you mean 'cifar10'",
    "data.central={kind='labels',client_labels=[]}": "data.central.client_labels says which",
    "data.joining.train=0": "at least 1",
    "data={held_out=0.1,test_share=0.1,partition={clients=3}}": "Give either data.held_out",
    "model.width=-3": "There is no setting 'model.width'",
    "model.hidden=[-3]": "'model.hidden' must be at least 1, not -3",
    "model.dropout=1": "at least 0 and below 1",
    "model={name='cnn',widths=[8],pool_after=2}": "In [model]: The pooling comes after",
    "model={name='resnet18',width=0}": "at least 1",
    "model={name='resnet18',width=3,norm='group'}": "In [model]: With GroupNorm a ResNet has an even width",
    "model={name='bilstm',dense=[0]}": "at least 1",
    "model={name='gru',hidden=0}": "at least 1",
    "model={name='vit',folder='x',rank=0}": "at least 1",
    "model={name='dual_encoder',width=0}": "at least 1",
    "model={name='vqa',fused=0}": "at least 1",
    "model={name='efficientnet_lite0',image_size=0}": "at least 1",
    "model.augment=['flap']": "'flip' or 'crop 4'",
    "model.criterion=crossentropy": "choose from cross_entropy",
    "client.nesterov=true": "In [client]: Nesterov's rule needs momentum above 0",
    "client={steps=1,epochs=1}": "Give either client.steps or client.epochs",
    "schedule={delay='half_normal'}": "needs schedule.sd",
    "schedule={delay='half_normal',sd=-1}": "at least 0",
    "schedule={delay='log_normal',median=0,sigma=1}": "a number above 0",
    "schedule={delay='trace',file='no-such-file.csv'}": "cannot be read",
    "schedule={speeds=[1,2],shares=[1]}": "as many shares as factors",
    "schedule.dropout=1": "at least 0 and below 1",
    "auxiliary.hidden=[-4]": "at least 1",
    "regulariser.scale=-1": "at least 0",
    "evaluate.sets=['local']": "set data.own_test",
    "evaluate.sets=['joined']": "set data.joining.round",
    "evaluate.sets=['adversary']": "set auxiliary.kind",
    "evaluate.on=validation": "set data.validation",
    "evaluate.on=centre": "set data.central.validation",
    "stop.metric=loss": "set data.validation",
}

COMMANDS |= {f"run digits --set {setting}": told for setting, told in (REFUSED | OF_OTHERS).items()}
for setting, told in OF_ALGORITHMS.items():
    COMMANDS[f"run digits --set algorithm={setting.partition('.')[0].partition('=')[0]} --set algorithms.{setting}"] = (
        told
    )
for algorithm in (
    "center",
    "transfer",
    "parallel",
    "gradient_1way",
    "gradient_2way",
    "fed_ft",
    "hfcl",
    "feddf",
    "feddle",
):
    COMMANDS[f"run digits --algorithm {algorithm} --set data.central.kind=none"] = "trains on data at the centre, and"
SCRIPT = """
import contextlib, io, json, sys, traceback
slow, commands = map(json.loads, sys.argv[1:])
sys.modules.update(dict.fromkeys(slow))  # importing one of them fails, and the traceback shows who does
from mixfed.cli import app
said = {}
for command in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            app(command.split(" "))
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
