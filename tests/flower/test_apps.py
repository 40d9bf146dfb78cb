"""The app that ``mixfed flower init`` writes, as a user starts it: ``flwr run`` with the server inside the SuperLink,
and sites by ``mixfed flower site``."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from mixfed.backends.flower.local import LocalFederation, free_port, script
from mixfed.backends.flower.post import from_record, to_record
from mixfed.backends.flower.worker import load
from mixfed.backends.parcels import Parcel, marks
from mixfed.experiments.app import write_app
from mixfed.experiments.federation import client_app, experiment_of, read_recipe, site_of
from mixfed.experiments.request import Request
from tests.algorithms.test_table import assert_equal
from tests.cli.tools import here, mixfed
from tests.warm import ROOT

pytestmark = pytest.mark.xdist_group("apps")

SMALL = ["--set", "data.partition.clients=6", "--set", "cohort=6", "--set", "evaluate.every=1"]
SMALL += ["--set", "simulator.executor=loop", "--set", "checkpoint.every=1"]


def wait_for(condition: Callable[[], bool], folder: Path, seconds: float = 150.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        logs = {log.name: log.read_text()[-2000:] for log in folder.glob("*.log")}
        assert time.monotonic() < until, logs
        time.sleep(0.1)


NETWORK = """
import torch

from sizes import INPUTS


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(INPUTS, 10)
"""


def own_recipe(home: Path) -> Path:
    """A recipe in a folder with a network of the user's own."""
    home.mkdir()
    (home / "net.py").write_text(NETWORK)
    (home / "sizes.py").write_text("INPUTS = 64\n")
    (home / "mine.toml").write_text('base = "digits"\n[model]\nname = "net.py:Net"\n')
    return home / "mine.toml"


def on_the_page(begins: str, changed: dict[str, str]) -> list[str]:
    """The first command of docs/deploy.md that begins so, with other words for some."""
    line = next(line for line in (ROOT / "docs/deploy.md").read_text().splitlines() if line.startswith(begins))
    for old, new in changed.items():
        assert old in line
        line = line.replace(old, new)
    name, *rest = shlex.split(line)
    return [script(name), *rest]


def test_flwr_run_with_the_server_in_the_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm site and a plain SuperNode, and a network in a file of the user's own, which imports another one. The run
    ends with the simulator's model, also when it goes on later with more rounds."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    app, out, recipe = tmp_path / "app", tmp_path / "out", own_recipe(tmp_path / "home")
    here("flower", "init", app, "--recipe", recipe, "--algorithm", "parallel", "--rounds", "1", *SMALL)
    federation = LocalFederation(tmp_path / "federation", [])
    federation.folder.mkdir()
    link_log = federation.folder / "superlink.log"
    address = f"127.0.0.1:{free_port()}"
    (federation.folder / "config.toml").write_text(f'[superlink.mine]\naddress = "{address}"\ninsecure = true\n')
    host, port = address.split(":")
    link = on_the_page("flower-superlink --insecure", {"8000": port})
    changed = {"127.0.0.1:8000": address, '"0-24"': '"0-2"', '"kept/one"': f'"{tmp_path / "kept"}"'}
    warm = on_the_page("mixfed flower site --insecure", changed)
    node = [word.replace('"0-2"', '"3-5"') for word in warm[3:]]
    plain = [script("flower-supernode"), *node, "--host", host, "--port", str(free_port())]

    def run(config: str, *options: str) -> str:
        place = {"app here": f"{app} mine", 'out="runs/first" set="rounds=10"': f'out="{out}" {config}', "--stream": ""}
        words = [*on_the_page("flwr run app here", place), *options]
        done = subprocess.run(words, check=True, env=dict(federation.environment()), capture_output=True, text=True)
        return done.stdout + done.stderr

    try:
        federation.start("superlink", link)
        wait_for(lambda: "startup complete" in link_log.read_text(), federation.folder)
        federation.start("warm", warm)
        federation.start("plain", plain)
        run("")
        wait_for((out / "federation.json").exists, federation.folder)
        first = json.loads((out / "result.json").read_text())
        (out / "federation.json").unlink()
        told = run("", "--stream")  # refused, for there is a run
        run('resume=true set="rounds=2"')
        wait_for((out / "federation.json").exists, federation.folder)
    finally:
        federation.stop()
    assert first["rounds"] == 1
    assert f"{out} already holds a run; go on" in told
    assert "Traceback" not in told
    here("run", recipe, "--algorithm", "parallel", "--rounds", "2", *SMALL, "--out", tmp_path / "simulated")
    assert_equal(*(load_file(folder / "model.safetensors") for folder in (out, tmp_path / "simulated")))


def test_another_version_of_the_users_own_code_is_refused(tmp_path: Path) -> None:
    """The network is in a file of the user's own beside the recipe, and the app has a copy."""
    request = Request(str(own_recipe(tmp_path / "home")), backend="flower")
    recipe = request.on(request.base())
    write_app(tmp_path / "app", recipe)
    greeting = Parcel(marks(experiment_of(recipe)) | {"kind": "hello"})
    node = {"clients": "0", "folder": str(tmp_path / "kept")}

    def answer() -> dict[str, object]:
        return site_of(read_recipe(tmp_path / "app/federation/recipe.toml"), node).answer(greeting).header

    assert answer()["clients"] == {"clients": [0]}
    (tmp_path / "app/federation/sizes.py").write_text("INPUTS = 64  # another version\n")
    assert "code of your own that these name; start both from the same files." in str(answer()["refused"])


def test_a_warm_site_runs_the_app_that_came_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apps of one name whose recipes differ, the first of them twice; each knows the fingerprint of its own recipe."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    context = Context(1, 1, {"clients": "0", "folder": str(tmp_path / "kept")}, RecordDict(), {})
    bundles = []
    for seed in (0, 1):
        request = Request("digits", seed=seed, backend="flower")
        recipe = request.on(request.base())
        write_app(tmp_path / str(seed), recipe)
        greeting = Parcel(marks(experiment_of(recipe)) | {"kind": "hello"})
        bundles.append((build_fab_from_disk(tmp_path / str(seed)), greeting))
    for content, greeting in (*bundles, bundles[0]):
        app = load(content, "mixfed/digits", "1.0.0", sha256(content).hexdigest())
        answer = from_record(app(Message(to_record(greeting), 1, "query"), context).content)
        assert answer.header["clients"] == {"clients": [0]}
    for name in [name for name in sys.modules if name.partition(".")[0] == "federation"]:
        del sys.modules[name]


def test_a_site_with_wrong_options_says_so() -> None:
    assert "unrecognized arguments: --nonsense" in mixfed("flower", "site", "--nonsense", expect=2).stderr


@pytest.mark.parametrize("travels", [True, False])
def test_data_stay_where_they_are(travels: bool, tmp_path: Path) -> None:
    """The files of a recipe are found from the app, which Flower copies elsewhere; a site that lacks them says so."""
    home = tmp_path / "home"
    home.mkdir()
    rows = "\n".join(f"u{i % 3},{i % 5},{i % 2}" for i in range(30))
    for name in ("phones.csv", "test.csv"):
        (home / name).write_text(f"user,a,y\n{rows}\n")
    data = '[data]\nsource = "files"\nclients = "phones.csv"\nclient = "user"\ntest = "test.csv"\n'
    (home / "mine.toml").write_text(data + "[client]\nepochs = 1\n")
    request = Request(str(home / "mine.toml"), backend="flower")
    recipe = request.on(request.base())
    write_app(tmp_path / "app", recipe, travels=travels)
    shutil.copytree(tmp_path / "app", tmp_path / "elsewhere")
    copied = tmp_path / "elsewhere/federation/recipe.toml"
    greeting = Parcel(marks(experiment_of(recipe)) | {"kind": "hello"})
    node = {"clients": "0-2", "folder": str(tmp_path / "kept")}
    assert site_of(read_recipe(copied), node).answer(greeting).header["clients"] == {"clients": [0, 1, 2]}
    (home / "phones.csv").unlink()
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    app, message = client_app(copied), Message(to_record(greeting), 1, "query")
    context = Context(1, 1, dict(node), RecordDict(), {})
    told = from_record(app(message, context).content).header["refused"]
    assert told.startswith(f"there is no file '{home / 'phones.csv'}'; paths are looked for in")
